"""The policies that the behaviour suite runs over, each with the oracle that says what it keeps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import kvec_jax as kv
from tests.oracle import policies, scores


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
}
