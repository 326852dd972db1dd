"""The oracles against others' numbers: transformers' logits, kvpress 0.5.5's kept entries, CompressKV's budgets.

kvpress's settings that ``kept.json`` stands for: window 16, average pooling 5. Its ratio r is the share removed, and
floor(T (1 - r)) entries stay: 39 of 200 at 0.8. Its readings that differ from ours:

* PyramidKV rounds last and counts the window as part of the pyramid (``budgets.pyramid_kvpress``).
* Ada-KV is a flat top-K over a layer's heads with a floor per head, no mix of counts (``policies.layer_scope``).
* CriticalKV's first stage takes half of the whole budget, window included.
* ObservedAttention divides by the number of queries that can see an entry; H2O itself doesn't.
* TOVA averages over all heads of a layer; its last token is always kept.
* ExpectedAttention: 4 sinks, 512 future positions, epsilon 0.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import budgets, policies, published, scores
from tests.oracle.forward import forward, hugging_face

RATIOS = {0.5: 100, 0.8: 39}
SNAP = dict(window=16, kernel=5, pooling="avg")


def golden(family: str) -> Path:
    return Path(__file__).parent / "goldens" / family


@functools.cache
def traces(folder: Path):
    config, w = hugging_face(folder)
    ids = np.load(folder / "logits.npz")["ids"]
    return config, w, ids, [forward(config, w, row) for row in ids]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(family):
    folder = golden(family)
    saved = np.load(folder / "logits.npz")
    _, _, _, each = traces(folder)
    for row, trace in enumerate(each):
        np.testing.assert_allclose(trace.logits[saved["positions"]], saved["logits"][row], atol=2e-4)


def snap_score(trace):
    return lambda layer: scores.snapkv(trace, layer, **SNAP)


def ada(trace, n, *_):
    return policies.layer_scope(trace, n, snap_score(trace), SNAP["window"], floor=0.2)


KVPRESS = {
    "StreamingLLM": lambda t, n, c: policies.streaming_llm(t, n, sinks=4),
    "SnapKV": lambda t, n, c: policies.snapkv(t, n, **SNAP),
    "TOVA": lambda t, n, c: policies.tova(t, n),
    "KNorm": lambda t, n, c: policies.per_head(t, n, functools.partial(scores.knorm, t)),
    "KeyDiff": lambda t, n, c: policies.per_head(t, n, functools.partial(scores.keydiff, t)),
    "ExpectedAttention": lambda t, n, c: policies.per_head(
        t, n, functools.partial(scores.expected_attention, t, config=c)
    ),
    "ObservedAttention": lambda t, n, c: policies.per_head(t, n, functools.partial(scores.observed, t)),
    "CriticalKV_SnapKV": lambda t, n, c: policies.criticalkv(t, n, **SNAP),
    "AdaKV_SnapKV": lambda t, n, c: ada(t, n),
    "CriticalAdaKV_SnapKV": lambda t, n, c: policies.critical_adakv(t, n, **SNAP, heads=ada),
    # The ratio itself, not the cut number: 200 * 0.2 is 40.
    "PyramidKV": lambda t, n, c: policies.pyramidkv(t, 40 if n == 39 else n, **SNAP, rule=budgets.pyramid_kvpress),
}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("method", KVPRESS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kept_entries_are_those_of_kvpress(family, method, ratio):
    folder = golden(family)
    want = json.loads((folder / "kept.json").read_text())["methods"][f"{method}@{ratio}"]["kept"]
    config, _, _, each = traces(folder)
    for row in range(len(want[0])):
        kept = KVPRESS[method](each[row], RATIOS[ratio], config)
        assert [[h.tolist() for h in layer] for layer in kept] == [layer[row] for layer in want]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_after_pruning_are_those_of_kvpress(family):
    folder = golden(family)
    want = json.loads((folder / "kept.json").read_text())["methods"]["SnapKV@0.8"]
    config, w, ids, _ = traces(folder)
    for row in range(2):
        kept = [layer[row] for layer in want["kept"]]
        logits = forward(config, w, [*ids[row], 7], kept, prompt=len(ids[row])).logits[-1]
        np.testing.assert_allclose(logits, want["next_logits_after_token_7"][row], atol=1e-4)


@pytest.mark.parametrize("model", published.COMPRESSKV_SHARES)
def test_compresskv_budgets_are_the_published_ones(model):
    shares = published.COMPRESSKV_SHARES[model]
    got = budgets.compresskv(shares, 256)
    assert got == published.COMPRESSKV_BUDGETS_256[model]
    assert sum(got) == 256 * len(shares)
    each = [budgets.compresskv(shares, average) for average in (128, 512, 1024, 2048)]
    np.testing.assert_allclose([(min(b), max(b)) for b in each], published.COMPRESSKV_EXTREMES[model], atol=1)
