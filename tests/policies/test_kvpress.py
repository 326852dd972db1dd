"""The kept entries and next logits of kvpress 0.5.5, wherever its definition of a method and ours coincide.

``kept.json`` is of window 16 and average pooling over 5 neighbours. kvpress keeps floor(T (1 - r)) of T = 200 entries
for its ratio r, in floating point: 100 at 0.5, 39 at 0.8. Its Ada-KV is a plain top-K over the heads of a layer here,
as the floor per head never acts on these prompts.
"""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.models.load import load_model
from tests.test_oracle import RATIOS, golden

POLICIES = {
    "StreamingLLM": lambda budget: kv.StreamingLLM(budget, sinks=4),
    "SnapKV": lambda budget: kv.SnapKV(budget, window=16, kernel=5, pooling="avg"),
    "AdaKV_SnapKV": lambda budget: kv.Policy(
        scorer=kv.WindowAttention(window=16, kernel=5, pooling="avg"), budget=budget, scope="layer"
    ),
}


@functools.cache
def loaded(family):
    folder = golden(family)
    methods = json.loads((folder / "kept.json").read_text())["methods"]
    return load_model(folder).model, jnp.asarray(np.load(folder / "logits.npz")["ids"]), methods


ONCE = [("llama", 0.8), ("llama", 0.5), ("qwen3", 0.8)]


@pytest.mark.parametrize("family, ratio", [*ONCE, pytest.param("qwen3", 0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", POLICIES)
def test_kept_entries_and_next_logits(family, method, ratio):
    model, ids, methods = loaded(family)
    want = methods[f"{method}@{ratio}"]
    _, cache = kv.prefill(model, ids, jnp.array([200, 200]), POLICIES[method](RATIOS[ratio]), reserve=1)
    for row in range(2):
        kept = [[head.tolist() for head in layer] for layer in cache.kept_positions(row)]
        assert kept == [layer[row] for layer in want["kept"]]
    if ratio == 0.8 and want["next_logits_after_token_7"]:
        logits, _ = kv.extend(model, cache, jnp.array([[7], [7]]))
        np.testing.assert_allclose(logits, want["next_logits_after_token_7"], atol=2e-4)
