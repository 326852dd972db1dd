"""Policies by name, for the command line and for methods that users add."""

import difflib
from collections.abc import Callable

from kvec_jax.policies.base import Policy
from kvec_jax.policies.snapkv import SnapKV
from kvec_jax.policies.streaming import FullCache, StreamingLLM

_FACTORIES: dict[str, Callable[..., Policy]] = {}


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
        close = difflib.get_close_matches(name, _FACTORIES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown policy {name!r}{hint} Known: {', '.join(names())}")
    return _FACTORIES[name]


register("full", FullCache)
register("streaming", StreamingLLM)
register("snapkv", SnapKV)
