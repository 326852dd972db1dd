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
from kvec_jax.policies import PerLayer
from tests.test_oracle import RATIOS, golden

SNAP = kv.WindowAttention(window=16, kernel=5, pooling="avg")


def pyramid(budget):
    """kvpress's layer budgets for 100 of 200 entries; at 39 its pyramid doesn't fit, and every layer gets 40."""
    return kv.Policy(scorer=SNAP, budget=PerLayer((184, 128, 72, 16)) if budget == 100 else 40)


POLICIES = {
    "StreamingLLM": lambda budget: kv.StreamingLLM(budget, sinks=4),
    "SnapKV": lambda budget: kv.SnapKV(budget, window=16, kernel=5, pooling="avg"),
    "PyramidKV": pyramid,
    "TOVA": kv.TOVA,
    "KNorm": kv.KNorm,
    "KeyDiff": kv.KeyDiff,
    "ExpectedAttention": lambda budget: kv.ExpectedAttention(budget, epsilon=0.0),
    "ObservedAttention": kv.ObservedAttention,
    "CriticalKV_SnapKV": lambda budget: kv.CriticalKV(budget, scorer=SNAP),
    "AdaKV_SnapKV": lambda budget: kv.AdaKV(budget, scorer=SNAP, floor=0.0),
    "CriticalAdaKV_SnapKV": lambda budget: kv.CriticalAdaKV(budget, scorer=SNAP, floor=0.0),
}


@functools.cache
def loaded(family):
    folder = golden(family)
    methods = json.loads((folder / "kept.json").read_text())["methods"]
    return load_model(folder).model, jnp.asarray(np.load(folder / "logits.npz")["ids"]), methods


OTHERS = [pytest.param(*other, marks=pytest.mark.slow) for other in (("llama", 0.5), ("qwen3", 0.5), ("qwen3", 0.8))]


@pytest.mark.parametrize("family, ratio", [("llama", 0.8), *OTHERS])
@pytest.mark.parametrize("method", POLICIES)
def test_kept_entries_and_next_logits(family, method, ratio):
    model, ids, methods = loaded(family)
    want = methods[f"{method}@{ratio}"]
    _, cache = kv.prefill(model, ids, jnp.array([200, 200]), POLICIES[method](RATIOS[ratio]), reserve=1)
    for row in range(len(want["kept"][0])):  # one row for CriticalAdaKV, where kvpress can't do more
        kept = [[head.tolist() for head in layer] for layer in cache.kept_positions(row)]
        assert kept == [layer[row] for layer in want["kept"]]
    if want["next_logits_after_token_7"]:
        logits, _ = kv.extend(model, cache, jnp.array([[7], [7]]))
        np.testing.assert_allclose(logits, want["next_logits_after_token_7"], atol=2e-4)
