"""Orbax checkpoints of what was loaded."""

import shutil

import jax
import numpy as np
import pytest

from kvec_jax.errors import LoadError
from kvec_jax.models.checkpoint import load_checkpoint, save_checkpoint
from kvec_jax.models.load import load_model
from kvec_jax.models.tokenizer import Tokenizer
from tests.models.files import GOLDENS, byte_tokenizer, random_tensors, small_config, write_folder
from tests.models.test_tokenizer import gguf_metadata


@pytest.fixture
def saved(tmp_path):
    model = load_model(GOLDENS / "gemma3").model
    tokenizer = Tokenizer.from_gguf(gguf_metadata(byte_tokenizer()) | {"tokenizer.chat_template": "{{ bos_token }}"})
    save_checkpoint(tmp_path / "saved", model, tokenizer)
    return tmp_path / "saved", model


def test_round_trip(saved):
    folder, model = saved
    loaded = load_model(folder)
    assert loaded.model.config == model.config
    assert hash(loaded.model.config) == hash(model.config)
    before, after = jax.tree.leaves(model), jax.tree.leaves(loaded.model)
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert loaded.tokenizer.encode("the") == [255, 101]
    assert (loaded.tokenizer.eos_token_ids, loaded.tokenizer.chat_template) == ((2,), "{{ bos_token }}")


def test_other_dtype(saved):
    folder, model = saved
    loaded = load_model(folder, dtype="bfloat16").model
    assert loaded.dtype == "bfloat16" and loaded.final_norm.get_value().dtype == "float32"
    expected = np.asarray(model.embedding.get_value()).astype("bfloat16")
    np.testing.assert_array_equal(np.asarray(loaded.embedding.get_value()), expected)


def test_rope_with_factors_and_no_tokenizer(tmp_path):
    scaling = {"type": "longrope", "long_factor": [1.0, 2.0, 5.0, 11.0], "short_factor": [1.0] * 4}
    config = small_config("phi3", rope_scaling=scaling)
    model = load_model(write_folder(tmp_path / "hub", config, random_tensors(config))).model
    save_checkpoint(tmp_path / "saved", model)
    again, tokenizer = load_checkpoint(tmp_path / "saved")
    assert again.config == model.config and tokenizer is None


def test_nothing_is_overwritten(saved):
    folder, model = saved
    with pytest.raises(FileExistsError, match="never overwritten"):
        save_checkpoint(folder, model)


def test_max_context_belongs_to_the_first_loading(saved):
    with pytest.raises(ValueError, match="keeps the context"):
        load_model(saved[0], max_context=64)


# Of reads that orbax abandons when another of the same checkpoint fails; they may end after its event loop has.
@pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")
def test_damaged_parameters(saved):
    folder, _ = saved
    largest = max((folder / "parameters" / "ocdbt.process_0" / "d").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    with pytest.raises(LoadError, match="parameters: the checkpoint is damaged"):
        load_checkpoint(folder)
    shutil.rmtree(folder / "parameters")
    with pytest.raises(LoadError, match="parameters: the checkpoint is damaged"):
        load_checkpoint(folder)


def test_damage(saved):
    folder, _ = saved
    settings = (folder / "kvec_model.json").read_text()
    (folder / "kvec_model.json").write_text(settings.replace('"num_attention_heads": 4', '"num_attention_heads": 8'))
    with pytest.raises(LoadError, match=r"layers.q_proj: expected \[6, 64, 128\], got \[6, 64, 64\]"):
        load_checkpoint(folder)
    (folder / "kvec_model.json").write_text(settings.replace('"num_attention_heads": 4', '"num_attention_heads": "x"'))
    with pytest.raises(LoadError, match="kvec_model.json: the configuration is damaged"):
        load_checkpoint(folder)
    (folder / "kvec_model.json").write_text(settings.replace('"format": 1', '"format": 9'))
    with pytest.raises(LoadError, match="written in format 9"):
        load_checkpoint(folder)
    (folder / "kvec_model.json").write_text(settings[:100])
    with pytest.raises(LoadError, match="kvec_model.json: damaged"):
        load_checkpoint(folder)
    (folder / "kvec_model.json").unlink()
    with pytest.raises(LoadError, match="not a checkpoint"):
        load_checkpoint(folder)
