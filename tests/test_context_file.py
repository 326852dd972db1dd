"""Contexts as files: the same answers from another process, and a clear error for every damaged or foreign file."""

import dataclasses
import functools
import json
import os
import pathlib
import random
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import kvec_jax as kv
from kvec_jax import context_file
from kvec_jax.testing import tiny_language_model

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 5
ASK = """
import sys
import kvec_jax as kv
from kvec_jax.testing import tiny_language_model
lm = tiny_language_model()
context = kv.load_context(sys.argv[1], lm)
print(lm.ask(context, "Who jumps?", max_new_tokens=12, eos_token_ids=()).tokens)
"""


@functools.cache
def lm() -> kv.LanguageModel:
    return tiny_language_model()


def answer(context):
    return lm().ask(context, "Who jumps?", max_new_tokens=12, eos_token_ids=()).tokens


@functools.cache
def compressed(document: str = DOCUMENT) -> kv.Context:
    return lm().compress(document, dataclasses.replace(kv.KNorm(48), scope="layer"))


@pytest.fixture
def saved(tmp_path) -> pathlib.Path:
    compressed().save(tmp_path / "fox.kv")
    return tmp_path / "fox.kv"


def refused(path, model=None) -> str:
    """The error's message, without the path that it begins with."""
    with pytest.raises(kv.LoadError) as caught:
        kv.load_context(path, model or lm())
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_a_loaded_context_is_the_one_that_was_saved(saved):
    loaded = kv.load_context(saved, lm())
    assert repr(loaded) == repr(compressed()) and answer(loaded) == answer(compressed())
    assert os.listdir(saved.parent) == ["fox.kv"]


def test_another_process_answers_the_same(saved):
    done = subprocess.run([sys.executable, "-c", ASK, str(saved)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == answer(compressed())


@pytest.mark.parametrize("policy, cache_dtype", [(kv.FullCache(), None), (kv.SnapKV(48, window=8), "int4")])
def test_other_caches_and_turns_are_saved_too(policy, cache_dtype, tmp_path):
    model = tiny_language_model(dtype=jnp.bfloat16)
    context = model.extend(model.compress(DOCUMENT, policy, cache_dtype=cache_dtype), "More.")
    context.save(tmp_path / "fox.kv")
    loaded = kv.load_context(tmp_path / "fox.kv", model)
    assert repr(loaded.cache) == repr(context.cache)
    first, second = (model.ask(each, "Who?", max_new_tokens=5, eos_token_ids=()) for each in (context, loaded))
    assert first.tokens == second.tokens


def test_a_flipped_bit_is_noticed_wherever_it_is(saved):
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(0)
    places = [rng.randrange(8) for _ in range(4)]
    places += [rng.randrange(8, header) for _ in range(20)] + [rng.randrange(header, len(content)) for _ in range(20)]
    places += [header - 1, header, len(content) - 1, content.find(b"sha256") + 20]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        saved.write_bytes(flipped)
        refused(saved)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.9, 0.9999])
def test_a_file_that_was_cut_off_is_noticed(saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    refused(saved)


def test_the_header_of_another_file_is_noticed(saved, tmp_path):
    other = tmp_path / "cat.kv"
    compressed(DOCUMENT.replace("dog", "cat")).save(other)
    mine, its = saved.read_bytes(), other.read_bytes()
    assert len(mine) == len(its)
    header = 8 + int.from_bytes(mine[:8], "little")
    saved.write_bytes(its[:header] + mine[header:])
    assert refused(saved) == "damaged (its checksum is wrong)"
    saved.write_bytes(mine + b"\0")
    assert refused(saved) == "damaged (its checksum is wrong)"


def test_foreign_files(tmp_path):
    path = tmp_path / "other"
    assert "no such file" in refused(path).lower()
    assert "directory" in refused(tmp_path).lower()
    for content in (b"", b"text", b"\2" + b"\0" * 7 + b"[]", b"\2" + b"\0" * 7 + b"{}", os.urandom(1000)):
        path.write_bytes(content)
        refused(path)
    path.write_bytes((9).to_bytes(8, "little") + b"[" * 9)
    refused(path)
    safetensors.numpy.save_file({"keys": np.zeros(3)}, path, {"format": "pt"})
    assert refused(path) == "no context, but 'pt'"
    safetensors.numpy.save_file({"keys": np.zeros(3)}, path, {"format": "kvec_jax context 99"})
    assert "written in the format 'kvec_jax context 99'" in refused(path)


def test_other_models(saved):
    assert "other weights" in refused(saved, tiny_language_model(seed=1))
    assert "other shapes" in refused(saved, tiny_language_model(intermediate_size=64))
    assert "made in float32, and the model is in bfloat16: load it with that dtype" in refused(
        saved, tiny_language_model(dtype=jnp.bfloat16)
    )
    kv.load_context(saved, tiny_language_model(max_position_embeddings=1024))  # that makes no difference
    with pytest.raises(TypeError, match="lm: expected the model that kvec_jax.load gives, got str"):
        kv.load_context(saved, "tiny")


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(context_file, "_checksum", full)
    with pytest.raises(OSError, match="disk full"):
        compressed().save(saved)
    assert saved.read_bytes() == before and os.listdir(saved.parent) == ["fox.kv"]


def test_whoever_may_read_new_files_may_read_a_context(saved, tmp_path):
    new = tmp_path / "new"
    new.touch()
    assert saved.stat().st_mode == new.stat().st_mode


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="no"):
        compressed().save(tmp_path / "no" / "fox.kv")
