"""The policies that the behaviour suite runs over, each with the oracle that says what it keeps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import kvec_jax as kv
from kvec_jax.policies.budgets import Weighted
from kvec_jax.policies.compresskv import RetrievalHeads
from kvec_jax.testing import tiny_config
from tests.oracle import budgets, policies, scores


@dataclasses.dataclass(frozen=True)
class Case:
    """``keep(trace)`` gives the oracle's kept positions of one prompt; ``window`` is always kept, if it fits.

    ``exact`` says that every layer keeps K * min(budget, length) entries, not only all of them together.
    """

    policy: Any
    keep: Callable
    window: int = 0
    exact: bool = True


def layer_snapkv(trace, budget, window):
    return policies.layer_scope(trace, budget, lambda i: scores.snapkv(trace, i, window), window)


SNAP = kv.WindowAttention(window=16, kernel=5, pooling="avg")
SNAP_ORACLE = dict(window=16, kernel=5, pooling="avg")
HEADS = ((0, 5), (1,), (7, 2, 3), (4, 0))
WEIGHTS = (0.1, 0.4, 0.3, 0.2)


def of(module_function, **settings):
    """An oracle's score of a layer under ``settings``, for ``policies.per_head``."""
    return lambda trace, budget, **more: policies.per_head(
        trace, budget, functools.partial(module_function, trace, **settings), **more
    )


def expected_attention(trace, budget):
    score = functools.partial(scores.expected_attention, trace, config=tiny_config(), epsilon=0.01)
    return policies.per_head(trace, budget, score)


def compresskv(trace, budget):
    total = trace.keys[0].shape[1]
    count = budgets.tokens(budget, total)
    layers = len(trace.keys)
    each = budgets.compresskv(WEIGHTS[:layers], count, min(32, count), 3, total)
    return policies.compresskv(trace, each, [list(h) for h in HEADS[:layers]])


def calibrated(layers):
    """A calibration belongs to a model with so many layers that attend to everything."""
    policy = kv.Policy(scorer=RetrievalHeads(heads=HEADS[:layers]), budget=Weighted(WEIGHTS[:layers], tokens=64))
    return Case(policy, lambda t: compresskv(t, 64), window=8, exact=False)


CASES = {
    "full": Case(kv.FullCache(), policies.everything),
    "streaming": Case(kv.StreamingLLM(64), lambda t: policies.streaming_llm(t, 64), window=60),
    "streaming-share": Case(kv.StreamingLLM(0.25, sinks=2), lambda t: policies.streaming_llm(t, 0.25, sinks=2)),
    "snapkv": Case(kv.SnapKV(64), lambda t: policies.snapkv(t, 64), window=32),
    "snapkv-share": Case(kv.SnapKV(0.25, window=16, kernel=1), lambda t: policies.snapkv(t, 0.25, 16, 1), window=16),
    "snapkv-layer-share": Case(
        kv.Policy(scorer=kv.WindowAttention(window=16), budget=0.25, scope="layer"),
        functools.partial(layer_snapkv, budget=0.25, window=16),
        window=16,
    ),
    "pyramidkv": Case(
        kv.PyramidKV(64, window=16),
        lambda t: policies.pyramidkv(t, 64, window=16, rule=budgets.pyramid_exact),
        window=16,
        exact=False,
    ),
    "adakv": Case(kv.AdaKV(64, scorer=SNAP), lambda t: policies.adakv(t, 64, **SNAP_ORACLE), window=16),
    "criticalkv": Case(kv.CriticalKV(64, scorer=SNAP), lambda t: policies.criticalkv(t, 64, **SNAP_ORACLE), window=16),
    "criticaladakv": Case(
        kv.CriticalAdaKV(64, scorer=SNAP), lambda t: policies.critical_adakv(t, 64, **SNAP_ORACLE), window=16
    ),
    "cake": Case(kv.CAKE(64, tau1=1.6, tau2=0.6), lambda t: policies.cake(t, 64, tau1=1.6, tau2=0.6), 32, exact=False),
    "tova": Case(kv.TOVA(64), lambda t: policies.tova(t, 64), window=1),
    "knorm": Case(kv.KNorm(64), lambda t: of(scores.knorm)(t, 64)),
    "keydiff": Case(kv.KeyDiff(64), lambda t: of(scores.keydiff)(t, 64)),
    "expected": Case(kv.ExpectedAttention(64), lambda t: expected_attention(t, 64)),
    "observed": Case(kv.ObservedAttention(64), lambda t: of(scores.observed)(t, 64)),
    "h2o": Case(kv.ObservedAttention(64, per_query=False), lambda t: of(scores.observed, normalize=False)(t, 64)),
    "random": Case(kv.Random(64), None),
    "kvec": Case(kv.KVec(64, unfocused_heads=1), lambda t: policies.kvec(t, 64, unfocused=1)[0], window=16),
    "kvec-share": Case(kv.KVec(0.25), lambda t: policies.kvec(t, 0.25)[0], window=16),
    "laprox": Case(kv.LaProx(64), lambda t: policies.laprox(t, 64), window=32, exact=False),
    "laprox-score-mean": Case(
        kv.LaProx(64, reading="score_mean"), lambda t: policies.laprox(t, 64, gqa="score_mean"), 32, exact=False
    ),
    "laprox-exact": Case(
        kv.LaProx(64, reading="exact"), lambda t: policies.laprox(t, 64, gqa="exact"), 32, exact=False
    ),
    "compresskv": calibrated(4),
}
