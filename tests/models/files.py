"""Writes small models to disk: random weights under the hub's names, folders, GGUF files."""

import json
import pathlib

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"


def golden(name):
    """The tensors and the configuration of a golden model."""
    folder = GOLDENS / name
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def small_config(model_type, **changes) -> dict:
    """A ``config.json`` in the older style."""
    fields = dict(
        model_type=model_type,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="silu",
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    return fields | changes


def random_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights for ``small_config``, float32, under the names on the hub."""
    rng = np.random.default_rng(seed)
    M, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    D = M // N

    def matrix(*shape):
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    out = {"model.embed_tokens.weight": matrix(V, M) * 4, "model.norm.weight": 1 + 0.1 * matrix(M)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(V, M)
    for i in range(config["num_hidden_layers"]):
        layer = {"input_layernorm": 1 + matrix(M), "post_attention_layernorm": 1 + matrix(M)}
        layer |= {"self_attn.o_proj": matrix(M, N * D), "mlp.down_proj": matrix(M, F)}
        if config["model_type"] == "phi3":
            layer |= {"self_attn.qkv_proj": matrix((N + 2 * K) * D, M), "mlp.gate_up_proj": matrix(2 * F, M)}
        else:
            layer |= {f"self_attn.{n}_proj": matrix(h * D, M) for n, h in (("q", N), ("k", K), ("v", K))}
            layer |= {f"mlp.{n}_proj": matrix(F, M) for n in ("gate", "up")}
        out |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
        if config["model_type"] == "qwen2":
            biases = {n: matrix(h * D) for n, h in (("q", N), ("k", K), ("v", K))}
            out |= {f"model.layers.{i}.self_attn.{n}_proj.bias": value for n, value in biases.items()}
    return out


def write_folder(folder: pathlib.Path, config: dict, tensors: dict, shards: int = 1) -> pathlib.Path:
    """A folder as on the hub; several shards get an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::shards]}
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str, gemma: bool) -> str:
    """The name of a hub tensor in GGUF."""
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in ends:
        return f"{ends[stem]}.{kind}"
    _, _, layer, stem = stem.split(".", 3)
    names = _GGUF_NAMES | {"post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm"}
    return f"blk.{layer}.{names[stem]}.{kind}"


def write_gguf(path: pathlib.Path, architecture: str, metadata: dict, tensors: dict, tokenizer: dict) -> pathlib.Path:
    """A GGUF file; ``metadata`` without the architecture in front, ``tokenizer`` without ``tokenizer.ggml.``."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        if isinstance(value, str):
            add = writer.add_string
        add(f"{architecture}.{key}", value)
    for key, value in tokenizer.items():
        add = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](f"tokenizer.ggml.{key}", value)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokenizer(pre: str = "smollm") -> dict:
    """The GGUF metadata of a byte-level tokenizer of 256 tokens with one merge, which takes the place of byte 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    tokens = [chr(b) if b in printable else chr(next(others)) for b in range(255)]
    kinds = [1] * 256
    return dict(
        model="gpt2", pre=pre, tokens=[*tokens, "th"], token_type=kinds, merges=["t h"], eos_token_id=2, bos_token_id=1
    )
