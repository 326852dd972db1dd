"""Peak memory of loading a model of half a billion parameters in bfloat16 from float32 files."""

import json
import math
import subprocess
import sys

import pytest

CONFIG = dict(
    model_type="qwen2",
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    hidden_act="silu",
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
)


def shapes():
    M, F, K = 896, 4864, 128
    layer = {"input_layernorm.weight": (M,), "post_attention_layernorm.weight": (M,)}
    for name, rows in (("q", M), ("k", K), ("v", K)):
        layer |= {f"self_attn.{name}_proj.weight": (rows, M), f"self_attn.{name}_proj.bias": (rows,)}
    layer |= {"self_attn.o_proj.weight": (M, M), "mlp.gate_proj.weight": (F, M)}
    layer |= {"mlp.up_proj.weight": (F, M), "mlp.down_proj.weight": (M, F)}
    out = {"model.embed_tokens.weight": (151_936, M), "model.norm.weight": (M,)}
    return out | {f"model.layers.{i}.{name}": shape for i in range(24) for name, shape in layer.items()}


SCRIPT = """
import resource, sys, jax
from kvec_jax.models.load import load_model
model = load_model(sys.argv[1], dtype="bfloat16").model
print(sum(leaf.nbytes for leaf in jax.tree.leaves(model)), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_peak_memory(tmp_path):
    header, at = {}, 0
    for name, shape in shapes().items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)  # zeros that take no room on the disk
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, check=True)
    parameters, peak = map(int, run.stdout.split())
    print(f"parameters {parameters / 1e6:.0f} MB, peak of the whole process {peak / 1e6:.0f} MB")
    assert parameters == pytest.approx(988e6, rel=0.01)
    assert peak < 1.25 * parameters + 300e6
