"""The runner: what it measures, how it goes on after an interruption, what it refuses."""

import errno
import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax import records
from kvec_jax.calibrate.replay import greedy
from kvec_jax.evals.example import make_prompt
from kvec_jax.evals.report import write_report
from kvec_jax.evals.run import RESULTS, evaluate
from kvec_jax.evals.settings import Settings
from kvec_jax.evals.tasks import Task
from kvec_jax.records import read_records
from tests.evals.tiny import TRIALS, example, language_model, tasks

SETTINGS = Settings(protocols=("aware", "agnostic"), batch=2)
SECONDS = {"prefill_seconds", "decode_seconds"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an evaluation that ran through."""
    folder = tmp_path_factory.mktemp("whole")
    evaluate(language_model(), folder, tasks(), TRIALS, SETTINGS)
    return folder


def results(folder):
    return read_records(folder / RESULTS)[1]


def test_a_line_for_each_example(whole):
    header, found = read_records(whole / RESULTS)
    assert header["model"] == "tiny" and header["versions"]["kvec_jax"]
    assert len(found) == 2 * (4 + 2)
    line = found["agnostic/letters/100/2"]
    assert (line["task"], line["protocol"], line["length"], line["depth"]) == ("letters", "agnostic", 100, 0.625)
    assert list(line["results"]) == ["full", "snapkv@40", "kvec@40"]
    for result in line["results"].values():
        assert 0 <= result["score"] <= 1 and result["new_tokens"] <= 6 and len(result["answer"]) <= 6
        assert result["prefill_seconds"] > 0 and result["decode_seconds"] > 0 and result["read_together"] == 3


@pytest.mark.parametrize("protocol", ["aware", "agnostic"])
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.label)
def test_measures_equal_those_of_the_plain_steps(whole, protocol, trial):
    """Against prefill and extend with one example, token by token."""
    lm, number = language_model(), 1
    prompt = make_prompt(lm.tokenizer, example(number), 1000)
    split = len(prompt.tokens) if protocol == "aware" else prompt.split
    rows = {}
    for name, policy in ("full", kv.FullCache()), ("mine", trial.policy):
        tokens = jnp.array([prompt.tokens[:split]])
        logits, cache = kv.prefill(lm.model, tokens, jnp.array([split]), policy, reserve=80)
        if name == "mine":
            share, kept = kv.coverage(cache)[0], np.asarray(cache.counts).sum() / (split * 8)
        for token in prompt.tokens[split:]:
            logits, cache = kv.extend(lm.model, cache, jnp.array([[token]]))
        if name == "mine":
            answer = np.asarray(greedy(lm.model, cache, logits, 6))[0]
        steps = []
        for token in prompt.gold:
            steps.append(np.asarray(logits[0], np.float64))
            logits, cache = kv.extend(lm.model, cache, jnp.array([[token]]))
        rows[name] = np.stack(steps) - np.log(np.exp(np.stack(steps)).sum(axis=1, keepdims=True))
    result = results(whole)[f"{protocol}/letters/100/{number}"]["results"][trial.label]
    full, mine = rows["full"], rows["mine"]
    gold = mine[np.arange(len(prompt.gold)), prompt.gold]
    assert result["nll"] == pytest.approx(-gold.mean(), abs=1e-4)
    assert result["kl"] == pytest.approx((np.exp(full) * (full - mine)).sum(axis=1).mean(), abs=1e-4)
    assert result["agreement"] == pytest.approx(np.mean(full.argmax(axis=1) == mine.argmax(axis=1)), abs=1e-4)
    assert result["coverage"] == pytest.approx(share, abs=1e-4) and result["kept"] == pytest.approx(kept, abs=1e-4)
    ends = lm.config.eos_token_ids
    stop = next((i + 1 for i, token in enumerate(answer) if token in ends), 6)
    assert result["answer"] == lm.tokenizer.decode(answer[:stop])
    assert result["cache_bytes"] == 8 * 2 * 16 * 4 * (40 if trial.budget else 128)


def test_where_entries_are_kept(whole):
    found = results(whole)
    where = np.array(found["aware/letters/100/0"]["results"]["snapkv@40"]["where"])
    assert where.shape == (8, 64) and np.all(where.sum(axis=1) == 40)
    assert found["aware/letters/100/1"]["results"]["snapkv@40"]["where"] is None


def test_text_that_goes_on(whole):
    for protocol in "aware", "agnostic":
        full, small, _ = results(whole)[f"{protocol}/going on/x0"]["results"].values()
        assert full["score"] == full["agreement"] == 1 and full["kl"] == 0 and full["new_tokens"] == 0
        assert small["score"] == small["agreement"] and small["kl"] > 0


def without_seconds(folder):
    header, found = read_records(folder / RESULTS)
    for line in found.values():
        for result in line["results"].values():
            for name in SECONDS:
                del result[name]
    return header, found


def test_interrupted_and_resumed_gives_the_same_report(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        evaluate(language_model(), tmp_path, tasks(), TRIALS, SETTINGS, progress=interrupt)
    lines = (tmp_path / RESULTS).read_text().splitlines()
    assert len(lines) == 1 + 2
    with open(tmp_path / RESULTS, "w") as file:
        file.write("\n".join(lines[:2]) + "\n" + lines[2][:50])  # killed in the middle of a batch, while it wrote
    evaluate(language_model(), tmp_path, tasks(), TRIALS, SETTINGS)
    assert without_seconds(tmp_path) == without_seconds(whole)
    for folder in whole, tmp_path:
        write_report(folder, pictures=False)
    for name in "report.md", "report.csv":
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def interrupt(*_):
    raise KeyboardInterrupt


def test_nothing_is_run_twice(whole, tmp_path, monkeypatch):
    (tmp_path / RESULTS).write_bytes((whole / RESULTS).read_bytes())
    monkeypatch.setattr("kvec_jax.evals.run.run_batch", interrupt)
    evaluate(language_model(), tmp_path, tasks(), TRIALS, SETTINGS)
    assert (tmp_path / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()


def test_policies_may_come_later_and_be_read_apart(whole, tmp_path):
    """One after the other, read separately: the same as all together, to rounding."""
    only = [Task("letters", tasks()[0].examples[:2])]
    for trial in TRIALS[1:]:
        evaluate(language_model(), tmp_path, only, [trial], Settings(batch=2, separate=True))
    expected = without_seconds(whole)[1]
    for key, line in without_seconds(tmp_path)[1].items():
        assert list(line["results"]) == ["snapkv@40", "kvec@40"]
        for label, result in line["results"].items():
            other = expected[key]["results"][label]
            assert result.pop("read_together") == 1 and other["read_together"] == 3
            for name, value in result.items():
                assert other[name] == (pytest.approx(value, abs=2e-4) if isinstance(value, float) else value)


def test_readings_fit_into_memory(tmp_path):
    only = [Task("letters", tasks()[0].examples[:1])]
    evaluate(language_model(), tmp_path, only, TRIALS, Settings(memory=140_000))
    (line,) = results(tmp_path).values()
    # The full cache of 128 tokens takes 131,072 bytes, the others 40,960 each.
    assert [result["read_together"] for result in line["results"].values()] == [1, 2, 2]


def test_other_settings_are_not_mixed(whole):
    with pytest.raises(ValueError, match=r"results.jsonl: begun with other settings \(seed\)"):
        evaluate(language_model(), whole, tasks(), TRIALS, SETTINGS, about={"seed": 1})


def test_question_that_cannot_be_told_from_its_context(tmp_path):
    task = Task("mixed", (example(0, context=None),))
    with pytest.raises(ValueError, match="mixed, 100/0: the question can't be told from the context"):
        evaluate(language_model(), tmp_path / "new", [task], TRIALS, Settings(protocols=("agnostic",)))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("changes", [dict(protocols=("blind",)), dict(batch=0), dict(memory=0), dict(most_tokens=3)])
def test_settings_that_cannot_be(changes):
    with pytest.raises(ValueError, match="expected"):
        Settings(**changes)


def test_full_disk_leaves_whole_lines(whole, tmp_path, monkeypatch):
    real, left = records._write, iter([True, False])

    def write(file, data):
        if next(left):
            return real(file, data)
        file.write(data[:20])
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / RESULTS))

    monkeypatch.setattr(records, "_write", write)
    with pytest.raises(OSError, match="No space left"):
        evaluate(language_model(), tmp_path, tasks(), TRIALS, SETTINGS)
    text = (tmp_path / RESULTS).read_text()
    assert text.endswith("\n") and len([json.loads(line) for line in text.splitlines()]) == 2
    monkeypatch.setattr(records, "_write", real)
    evaluate(language_model(), tmp_path, tasks(), TRIALS, SETTINGS)
    assert without_seconds(tmp_path) == without_seconds(whole)


def test_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        evaluate(language_model(), tmp_path / "file", tasks(), TRIALS, SETTINGS)
    with pytest.raises(OSError):
        evaluate(language_model(), "/proc/evaluation", tasks(), TRIALS, SETTINGS)
