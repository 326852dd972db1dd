"""GGUF: the golden models written as llama.cpp's converter would, and damaged files."""

import numpy as np
import pytest

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models.gguf import config_from_gguf
from kvec_jax.models.gguf_file import read_gguf
from kvec_jax.models.load import load_model
from kvec_jax.models.rope import Rope
from tests.models.files import GOLDENS, byte_tokenizer, gguf_name, golden, write_gguf
from tests.models.plain import logits


def metadata(config, architecture):
    rope = config["rope_parameters"]
    out = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
    }
    if "head_dim" in config:
        out |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if architecture == "gemma3":
        out["attention.sliding_window"] = config["sliding_window"]
    return out


def converted(name):
    """Metadata and tensors of a golden model in GGUF's conventions."""
    tensors, config = golden(name)
    gemma = name == "gemma3"
    out = {}
    for key, value in tensors.items():
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = config["num_attention_heads" if "q_proj" in key else "num_key_value_heads"]
            halves = value.reshape(heads, 2, -1, value.shape[-1])
            value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        if gemma and "norm" in key:
            value = value + 1
        out[gguf_name(key, gemma)] = value
    if name == "llama":
        scaled = Rope(theta=500000.0, kind="llama3", factor=8.0, original_max_position=256)
        plain = Rope(theta=500000.0)
        out["rope_freqs.weight"] = plain.inverse_frequencies(16) / scaled.inverse_frequencies(16)
    return metadata(config, name), out


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits(name, tmp_path):
    values, tensors = converted(name)
    if name == "gemma3":
        # Its attention scale isn't in the metadata; the golden model's differs from what every real one uses.
        for key in tensors:
            if "attn_q_norm" in key:
                tensors[key] = tensors[key] * np.float32((16 / 24) ** 0.5)
    path = write_gguf(tmp_path / "model.gguf", name, values, tensors, byte_tokenizer())
    loaded = load_model(path)
    expected = np.load(GOLDENS / name / "logits.npz")
    got = logits(loaded.model, expected["ids"], expected["positions"])
    np.testing.assert_allclose(got, expected["logits"], rtol=0, atol=2e-4)
    assert loaded.tokenizer.encode("math") == [109, 97, 255]
    assert loaded.tokenizer.eos_token_ids == (2,)


def write(tmp_path, architecture="qwen3", drop=(), tokenizer=None, **changes):
    values, tensors = converted("qwen3")
    values = {k: v for k, v in (values | changes).items() if k not in drop}
    tensors = {k: v for k, v in tensors.items() if k not in drop}
    return write_gguf(tmp_path / "model.gguf", architecture, values, tensors, tokenizer or byte_tokenizer())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.99])
def test_cut_off(tmp_path, share):
    path = write(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(LoadError, match="model.gguf"):
        load_model(path)


def test_not_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(LoadError, match="not a GGUF file"):
        load_model(path)


def test_missing_and_unexpected_tensors_are_named_together(tmp_path):
    path = write(tmp_path, drop=("blk.2.attn_k.weight", "blk.0.ffn_up.weight"))
    with pytest.raises(LoadError, match=r"2 tensors.*\n.*blk\.2\.attn_k\.weight(.|\n)*blk\.0\.ffn_up\.weight"):
        load_model(path)


def test_unknown_architecture_lists_the_known(tmp_path):
    with pytest.raises(UnsupportedError, match="unknown architecture 'mamba'.*gemma3, llama, qwen2, qwen3"):
        load_model(write(tmp_path, architecture="mamba"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"expert_count": 8}, "expert_count = 8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "rope.scaling.type = 'longrope'"),
    ],
)
def test_what_is_not_done_is_refused(tmp_path, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        load_model(write(tmp_path, **changes))


def test_wrong_head_count(tmp_path):
    with pytest.raises(LoadError, match=r"attn_q\.weight has shape \[128, 64\], expected \[192, 64\]"):
        load_model(write(tmp_path, **{"attention.head_count": 12}))
    with pytest.raises(LoadError, match="multiple of num_key_value_heads"):
        load_model(write(tmp_path, **{"attention.head_count": 7}))


def test_missing_metadata(tmp_path):
    with pytest.raises(LoadError, match="lacks qwen3.embedding_length"):
        load_model(write(tmp_path, drop=("embedding_length",)))


def test_yarn_and_linear(tmp_path):
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
    rope = config_from_gguf(read_gguf(write(tmp_path, **scaling))).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 512)
    assert rope.attention_factor == pytest.approx(1.13863, abs=1e-5)
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    rope = config_from_gguf(read_gguf(write(tmp_path, **scaling))).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_unknown_pre_tokenizer(tmp_path):
    with pytest.raises(UnsupportedError, match="tokenizer.ggml.pre = 'tekken'.*known: smollm, qwen2, llama-bpe"):
        load_model(write(tmp_path, tokenizer=byte_tokenizer("tekken")))
