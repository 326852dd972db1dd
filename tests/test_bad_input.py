"""What a new user gets wrong, through the public functions: an error at the call that says what was expected."""

import types

import jax.numpy as jnp
import pytest

import kvec_jax as kv
from kvec_jax.testing import tiny_language_model

LM = tiny_language_model(num_hidden_layers=2)
TOKENS, LENGTHS, POLICY = jnp.arange(60)[None], jnp.array([60]), kv.SnapKV(40)


def context():
    cache = types.SimpleNamespace(mesh=None)  # nothing gets as far as to look into it
    return kv.Context(cache=cache, document_tokens=1, policy="", model=LM.identity, chat=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kv.load(5), TypeError, "name_or_path: expected a model's name or path, got 5"),
        (lambda: kv.load(""), kv.LoadError, "expected a model's name or path, got ''; known models: smollm2"),
        (lambda: kv.load("no-such"), kv.LoadError, "no-such: no such file or folder; known models: smollm2"),
        (lambda: LM.generate(5), TypeError, "prompt: expected a string, chat messages, or a list of either, got 5"),
        (lambda: LM.generate(["a", ""]), ValueError, "got an empty prompt .number 1"),
        (lambda: LM.generate([{"role": "user", "content": 5}]), ValueError, "expected a text as 'content', got 5"),
        (lambda: LM.generate("x", policy="snapkv"), TypeError, "expected a Policy such as kvec_jax.SnapKV.256., got"),
        (lambda: LM.generate("x", policy=kv.SnapKV), TypeError, "policy: expected a Policy such as"),
        (lambda: LM.generate("x", max_new_tokens=0), ValueError, "max_new_tokens: expected an integer, 1 or more"),
        (lambda: LM.generate("x", sampler="greedy"), TypeError, "sampler: expected Greedy.. or Sample"),
        (lambda: LM.generate("x", sampler=kv.Sample()), ValueError, "key: Sample needs a random key"),
        (lambda: LM.generate("x", stream=5), TypeError, "stream: expected a function that takes text"),
        (lambda: LM.generate("x", eos_token_ids=[999]), ValueError, "eos_token_ids: expected 0 to 255, got 999"),
        (lambda: LM.generate("x", implementation="cuda"), ValueError, "implementation: expected 'xla' or"),
        (lambda: LM.generate("x", cache_dtype="int2"), ValueError, "cache_dtype: expected 'int8' or 'int4', got"),
        (lambda: LM.generate("x", kv.KVec(64), chunk=64), kv.UnsupportedError, "chunk: kvec can't choose again"),
        (lambda: LM.generate("x", kv.CompressKV(64, calibration="smollm2-135m")), ValueError, "of another model"),
        (lambda: LM.compress(5, POLICY), TypeError, "document: expected a string or"),
        (lambda: LM.compress("x", kv.Tiered()), kv.UnsupportedError, "'tiered' works with LanguageModel.generate only"),
        (lambda: LM.ask("context", "x"), TypeError, "context: expected what compress or load_context gave"),
        (lambda: LM.ask(context(), 7), TypeError, "question: expected a string or a list of them, got 7"),
        (lambda: LM.ask(context(), []), ValueError, "question: expected at least one, got an empty list"),
        (lambda: kv.load_context("none.kv", LM), kv.LoadError, "none.kv: can't be read"),
        (lambda: kv.prefill(LM, TOKENS, LENGTHS, POLICY), TypeError, "model: expected a Transformer, such as lm.model"),
        (lambda: kv.sweep(LM, TOKENS, LENGTHS, [POLICY]), TypeError, "model: expected a Transformer, such as lm.model"),
        (lambda: kv.prefill(LM.model, TOKENS[0], LENGTHS, POLICY), ValueError, r"integers of shape \[B, T\], got"),
        (lambda: kv.prefill(LM.model, TOKENS + 999, LENGTHS, POLICY), ValueError, "tokens: expected 0 to 255, got 999"),
        (lambda: kv.prefill(LM.model, TOKENS, LENGTHS + 1, POLICY), ValueError, "lengths: expected 1 to 60, got 61"),
        (lambda: kv.extend(LM.model, None, TOKENS), TypeError, "cache: expected a CompressedKV, which prefill gives"),
        (lambda: kv.quantise(3, "int8"), TypeError, "cache: expected a CompressedKV, which prefill gives, got int"),
        (lambda: kv.SnapKV("256"), TypeError, "budget: expected tokens per key-value head .int. or a share"),
        (lambda: kv.SnapKV(8), ValueError, "budget: expected at least 32 tokens"),
        (lambda: kv.SnapKV(1.5), ValueError, r"budget: expected a share of the prompt in \(0, 1\]"),
        (lambda: kv.CompressKV(64, calibration="other"), kv.LoadError, "make one with: kvec calibrate other"),
        (lambda: kv.SeKV(2), ValueError, r"device_share: expected a share in \(0, 1\], got 2"),
        (lambda: kv.policies.get("snapvk"), ValueError, "unknown policy 'snapvk'; did you mean 'snapkv'"),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_file_that_cannot_be_written_to_is_named(tmp_path):
    from kvec_jax.files import write_whole

    with pytest.raises(IsADirectoryError, match="this is a folder: '.*here'"):
        (tmp_path / "here").mkdir()
        write_whole(tmp_path / "here", "x")
    with pytest.raises(FileNotFoundError, match="no such folder to write in: '.*away'"):
        write_whole(tmp_path / "away" / "x", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
