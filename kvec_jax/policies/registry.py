"""Policies by name, for the command line and for methods that users add."""

import difflib
from collections.abc import Callable

from kvec_jax.policies.adaptive import AdaKV, PyramidKV
from kvec_jax.policies.attention import TOVA, ObservedAttention
from kvec_jax.policies.base import Policy
from kvec_jax.policies.cake import CAKE
from kvec_jax.policies.compresskv import CompressKV
from kvec_jax.policies.critical import CriticalAdaKV, CriticalKV
from kvec_jax.policies.expected import ExpectedAttention
from kvec_jax.policies.keys import KeyDiff, KNorm, Random
from kvec_jax.policies.kvec import KVec
from kvec_jax.policies.laprox import LaProx
from kvec_jax.policies.snapkv import SnapKV
from kvec_jax.policies.streaming import FullCache, StreamingLLM

_FACTORIES: dict[str, Callable[..., Policy]] = {
    "full": FullCache,
    "streaming": StreamingLLM,
    "snapkv": SnapKV,
    "kvec": KVec,
    "laprox": LaProx,
    "compresskv": CompressKV,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "criticalkv": CriticalKV,
    "criticaladakv": CriticalAdaKV,
    "cake": CAKE,
    "tova": TOVA,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "expected": ExpectedAttention,
    "observed": ObservedAttention,
    "random": Random,
}


def register(name: str, factory: Callable[..., Policy]) -> None:
    """Makes a policy known by name.

    Args:
        name: Lower-case name.
        factory: Called with ``budget`` and keyword settings; gives the ``Policy``.

    Raises:
        ValueError: If the name is taken.
    """
    if name in _FACTORIES:
        raise ValueError(f"policy {name!r} is registered already")
    _FACTORIES[name] = factory


def names() -> list[str]:
    """Known names, sorted."""
    return sorted(_FACTORIES)


def get(name: str) -> Callable[..., Policy]:
    """The factory of a policy.

    Raises:
        ValueError: If there is none of that name; it lists those there are.
    """
    if name not in _FACTORIES:
        close = difflib.get_close_matches(name.lower(), _FACTORIES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"unknown policy {name!r}{hint} Known: {', '.join(names())}")
    return _FACTORIES[name]
