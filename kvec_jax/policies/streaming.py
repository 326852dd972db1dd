"""StreamingLLM and the uncompressed cache: what they keep does not depend on what the model sees."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvec_jax.policies.base import Observation, Policy, Stateless
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class Recency(Stateless):
    """Scores every entry by its position: the newest are the best."""

    repeatable = True

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Positions float32 [B, K, T]."""
        B, K, T, _ = seen.keys.shape
        return jnp.broadcast_to(jnp.arange(T, dtype=jnp.float32), (B, K, T)), carry


def StreamingLLM(budget: Any, *, sinks: int = 4) -> Policy:
    """The first few tokens and the newest ones, https://arxiv.org/abs/2309.17453 (section 3.2).

    The keys keep the rotation of their own positions; the paper's positions inside the cache are not imitated.

    Args:
        budget: See ``Policy``.
        sinks: First tokens of the prompt that are always kept.

    Example:
        >>> StreamingLLM(128).sinks
        4
    """
    return Policy(scorer=Recency(), budget=budget, sinks=sinks, name="streaming")


def FullCache() -> Policy:
    """Keeps every entry: the cache of the uncompressed model, for comparison.

    Example:
        >>> FullCache().name
        'full'
    """
    return Policy(scorer=Recency(), budget=1.0, name="full")
