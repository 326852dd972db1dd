"""Folders of safetensors: shards, casts, and every way in which they can be wrong."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models.load import load_model
from kvec_jax.models.weights import resolve_dtype
from tests.models.files import random_tensors, small_config, write_folder

CONFIG = small_config("qwen2")


@pytest.fixture
def tensors():
    return random_tensors(CONFIG)


def test_shards_equal_a_single_file(tmp_path, tensors):
    one = load_model(write_folder(tmp_path / "one", CONFIG, tensors)).model
    three = load_model(write_folder(tmp_path / "three", CONFIG, tensors, shards=3)).model
    for name in ("q_proj", "k_bias", "down_proj", "mlp_norm"):
        first, second = (np.asarray(getattr(model.layers, name).get_value()) for model in (one, three))
        np.testing.assert_array_equal(first, second)
    stored = tensors["model.layers.2.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(np.asarray(one.layers.k_proj.get_value())[2], stored.T)


@pytest.mark.parametrize("stored", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_casts(tmp_path, tensors, stored, wanted):
    cast = {name: value.astype(stored) for name, value in tensors.items()}
    model = load_model(write_folder(tmp_path, CONFIG, cast), dtype=wanted).model
    expected = cast["lm_head.weight"].astype(wanted)
    np.testing.assert_array_equal(np.asarray(model.lm_head.get_value()), expected)
    assert model.layers.input_norm.get_value().dtype == "float32"


def test_tied_output_beside_the_embedding_is_ignored(tmp_path, tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    model = load_model(write_folder(tmp_path, CONFIG | {"tie_word_embeddings": True}, tensors)).model
    assert not hasattr(model, "lm_head")


def test_all_mismatches_at_once(tmp_path, tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((32, 16), np.float32)
    tensors["model.layers.7.input_layernorm.weight"] = np.zeros(32, np.float32)
    tensors["score.weight"] = np.zeros((2, 32), np.float32)
    with pytest.raises(LoadError) as caught:
        load_model(write_folder(tmp_path, CONFIG, tensors))
    message = str(caught.value)
    assert "4 tensors don't fit" in message
    assert "missing tensor layers.1.mlp.up_proj.weight" in message
    assert "model.layers.0.self_attn.q_proj.weight has shape [32, 16], expected [32, 32]" in message
    assert "unexpected tensor model.layers.7.input_layernorm.weight" in message
    assert "unexpected tensor score.weight" in message


def test_fused_tensor_of_the_wrong_height(tmp_path):
    config = small_config("phi3")
    tensors = random_tensors(config)
    tensors["model.layers.1.self_attn.qkv_proj.weight"] = np.zeros((72, 32), np.float32)
    with pytest.raises(LoadError, match=r"qkv_proj.weight has shape \[72, 32\], expected \[64, 32\]"):
        load_model(write_folder(tmp_path, config, tensors))


def test_wrong_head_count(tmp_path, tensors):
    with pytest.raises(LoadError, match=r"k_proj.weight has shape \[16, 32\], expected \[32, 32\]"):
        load_model(write_folder(tmp_path, CONFIG | {"num_key_value_heads": 4}, tensors))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 0.999])
def test_truncated_shard(tmp_path, tensors, share):
    write_folder(tmp_path, CONFIG, tensors, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(LoadError, match="model-00002-of-00002.safetensors: .*cut off"):
        load_model(tmp_path)


def rewrite_header(path, change):
    """Lets ``change`` edit the header of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])


@pytest.mark.parametrize(
    "entry, error, message",
    [
        ({"dtype": "F33"}, LoadError, "model.norm.weight has the unknown dtype 'F33'"),
        ({"dtype": "F8_E4M3"}, UnsupportedError, "model.norm.weight is stored as F8_E4M3"),
        ({"shape": [31]}, LoadError, "entry for model.norm.weight is damaged"),
        ({"shape": "wide"}, LoadError, "entry for model.norm.weight is damaged"),
        ({"data_offsets": [0]}, LoadError, "entry for model.norm.weight is damaged"),
        ({"data_offsets": [-128, 0]}, LoadError, "entry for model.norm.weight is damaged"),
        ({"data_offsets": [10**9, 10**9 + 128]}, LoadError, "cut off"),
    ],
)
def test_damaged_header(tmp_path, tensors, entry, error, message):
    write_folder(tmp_path, CONFIG, tensors)
    rewrite_header(tmp_path / "model.safetensors", lambda header: header["model.norm.weight"].update(entry))
    with pytest.raises(error, match=f"model.safetensors: .*{message}"):
        load_model(tmp_path)


def test_header_that_is_no_json(tmp_path, tensors):
    write_folder(tmp_path, CONFIG, tensors)
    (tmp_path / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"x" * 100)
    with pytest.raises(LoadError, match="not valid JSON"):
        load_model(tmp_path)


def test_index_naming_what_is_not_there(tmp_path, tensors):
    write_folder(tmp_path, CONFIG, tensors, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": places | {"model.extra": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(LoadError, match="names tensors that are not there: model.extra"):
        load_model(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match="names files that are not there: model-00002-of-00002.safetensors"):
        load_model(tmp_path)
    index.write_text("{}")
    with pytest.raises(LoadError, match="not a readable index"):
        load_model(tmp_path)


def test_folders_that_lack_something(tmp_path, tensors):
    with pytest.raises(LoadError, match="no config.json in this folder"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="config.json: not valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(LoadError, match="no model.safetensors or model.safetensors.index.json"):
        load_model(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match="not a readable tokenizer.json"):
        load_model(tmp_path)


def test_paths_that_mean_nothing(tmp_path):
    with pytest.raises(LoadError, match="no such file or folder; known models: smollm2-135m"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(LoadError, match="no such file or folder"):
        load_model("missing.gguf")
    with pytest.raises(LoadError, match="no such file or folder"):
        load_model("smollm3")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(LoadError, match="expected a folder or a .gguf file"):
        load_model(tmp_path / "model.bin")


def test_dtypes():
    assert resolve_dtype(None) == "float32"
    assert resolve_dtype(ml_dtypes.bfloat16) == resolve_dtype("bfloat16")
    for wrong in ("float16", "int8", "half a float", 3):
        with pytest.raises(ValueError, match="dtype: expected float32 or bfloat16, got"):
            resolve_dtype(wrong)
