"""SnapKV: an entry matters as much as the last tokens of the prompt attend to it."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from kvec_jax.arguments import check_choice, check_count, check_kernel
from kvec_jax.policies.base import Observation, Policy, Stateless
from kvec_jax.scores import pool_scores
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class WindowAttention(Stateless):
    """Mean attention of the last ``window`` queries and of a group's query heads, pooled over neighbours.

    Args:
        window: Queries that look; their own entries are always kept.
        kernel: Odd number of neighbours that are pooled; 1 pools nothing.
        pooling: ``"max"`` or ``"avg"``; neighbours outside the prompt before the window count as nothing.

    Raises:
        ValueError: For a window below 1, an even kernel or an unknown pooling.
    """

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"
    repeatable = True

    def __post_init__(self):
        check_count("window", self.window, 1)
        check_kernel("kernel", self.kernel)
        check_choice("pooling", self.pooling, ("max", "avg"))

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Pooled mean attention float32 [B, K, T]."""
        rows = jnp.minimum(seen.lengths, self.window)[:, None, None]

        def mean(weights, looks):
            return jnp.sum(jnp.sum(weights, axis=0) / seen.group, axis=0)  # over the group, then the window

        scores = seen.window_scores(self.window, mean) / rows
        return pool_scores(scores, seen.lengths - self.window, self.kernel, self.pooling), carry


def SnapKV(budget: Any, *, window: int = 32, kernel: int = 7, pooling: Literal["max", "avg"] = "max") -> Policy:
    """Each head keeps the entries that the end of the prompt attends to, https://arxiv.org/abs/2404.14469.

    Score (section 4.2, with the settings of the official LongBench runs as defaults): the softmax attention of the last
    ``window`` queries over all keys, summed over the window (a mean here, which ranks the same), pooled over ``kernel``
    neighbours among the keys before the window. The window itself is kept and counts inside the budget.

    Choices where the paper is silent: with grouped queries, the mean over the query heads of a key-value head is taken
    before pooling, so that a head ranks its own entries once; scores are float32; of equal scores the earlier position
    is kept; a prompt shorter than the window is kept whole.

    Args:
        budget: See ``Policy``.
        window: Queries that look.
        kernel: Neighbours that are pooled.
        pooling: ``"max"`` or ``"avg"``.

    Example:
        >>> SnapKV(256).scorer
        WindowAttention(window=32, kernel=7, pooling='max')
    """
    return Policy(scorer=WindowAttention(window, kernel, pooling), budget=budget, name="snapkv")
