"""The runner over tiers: the measures of the plain steps, beside the full cache's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax import cli
from kvec_jax.calibrate.settings import Text
from kvec_jax.evals.example import make_prompt
from kvec_jax.evals.run import RESULTS, evaluate
from kvec_jax.evals.settings import Settings
from kvec_jax.evals.trials import Trial
from kvec_jax.records import read_records
from kvec_jax.running import cut_at_end
from kvec_jax.tiers.decoder import read_prompts
from tests.evals.tiny import example, language_model, story, tasks

WHOLE = kv.Tiered(budget=1.0, recent=16)
FEW = kv.Tiered(budget=0.25, recent=16)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiered")
    policies = [
        ("full", None, kv.FullCache()),
        ("whole", 1.0, WHOLE),
        ("few", 0.25, FEW),
    ]
    settings = Settings(protocols=("aware", "agnostic"), batch=2)
    evaluate(language_model(), folder, tasks(), [Trial(*each) for each in policies], settings)
    return {key: line["results"] for key, line in read_records(folder / RESULTS)[1].items()}


def test_whole_budget_measures_what_the_full_cache_does(results):
    assert len(results) == 2 * (4 + 2)
    for line in results.values():
        full, whole = line["full"], line["whole@1.0"]
        assert whole["nll"] == pytest.approx(full["nll"], abs=1e-4) and whole["kl"] == pytest.approx(0, abs=1e-4)
        assert [whole[key] for key in ("agreement", "kept", "coverage", "answer")] == [1.0, 1.0, 1.0, full["answer"]]


@pytest.mark.parametrize("protocol", ["aware", "agnostic"])
def test_measures_are_those_of_a_prompt_alone(results, protocol):
    lm, number = language_model(), 1
    prompt = make_prompt(lm.tokenizer, example(number), 1000)
    split = len(prompt.tokens) if protocol == "aware" else prompt.split
    along = list(alone(lm.model, prompt.tokens, split, len(prompt.gold), lambda i, _: prompt.gold[i]))
    written = [int(x.argmax()) for x in alone(lm.model, prompt.tokens, split, 6, lambda _, logits: logits.argmax())]
    mine = np.asarray(jax.nn.log_softmax(np.stack(along)))
    result = results[f"{protocol}/letters/100/{number}"]["few@0.25"]
    assert result["nll"] == pytest.approx(-mine[np.arange(len(along)), np.array(prompt.gold)].mean(), abs=1e-4)
    assert result["kl"] > 1e-4 and result["read_together"] == 2
    assert result["answer"] == lm.tokenizer.decode(cut_at_end(written, lm.config.eos_token_ids))


def alone(model, tokens, split, steps, choose):
    """Logits [V] before each of so many tokens, which ``choose`` names, after a prompt and a question."""
    logits, decoder = read_prompts(model, jnp.array([tokens[:split]]), jnp.array([split]), FEW, 64)
    question = tokens[split:]
    with decoder:
        for i in range(len(question) + steps):
            if i >= len(question):
                yield np.asarray(logits[0])
            token = question[i] if i < len(question) else choose(i - len(question), logits[0])
            (hidden,) = decoder.step(np.array([token], np.int32), np.array([False]))
            logits = model.unembed(hidden)


def test_after_a_policy_that_drops_some(tmp_path):
    policy = kv.Tiered(budget=1.0, recent=16, policy=kv.SnapKV(40))
    trials = [Trial("snapkv", 40, kv.SnapKV(40)), Trial("both", 1.0, policy)]
    evaluate(language_model(), tmp_path, tasks()[:1], trials, Settings(batch=2))
    for line in read_records(tmp_path / RESULTS)[1].values():
        alone, both = line["results"].values()
        for key in ("nll", "kl", "kept", "coverage"):
            assert both[key] == pytest.approx(alone[key], abs=1e-4)
        assert both["answer"] == alone["answer"]


@pytest.mark.slow
def test_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv, "load", lambda name, **_: language_model())
    monkeypatch.setattr(Text, "reference", story)
    policy = f"tiered:recent=16:disk={tmp_path}:host_bytes=0"
    command = ["eval", "--out", str(tmp_path / "out"), "--policies", f"full,{policy}", "--budgets", "0.25"]
    assert cli.main([*command, *"--tasks needle --lengths 700 --examples 2 --no-pictures".split()]) == 0
    assert "tiered:recent=16" in capsys.readouterr().out
