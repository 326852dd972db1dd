"""K-VEC: coverage-driven eviction across heads and layers, https://arxiv.org/abs/2606.29563."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_choice, check_count, check_kernel, check_number, check_share
from kvec_jax.models.config import ModelConfig
from kvec_jax.policies.base import Observation, Policy, Scores, Stateless
from kvec_jax.scores import pool_scores
from kvec_jax.select import ordered_keys, top_k_mask
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class Coverage(Stateless):
    """K-VEC's scores; see ``KVec``. What is carried: how many earlier layers chose each token, int32 [B, T]."""

    window: int = 16
    extended_window: int = 32
    unfocused_heads: int = 3
    novelty_weight: float = 1.0
    forced_share: float = 0.25
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"
    importance: Literal["group", "query"] = "group"

    def __post_init__(self):
        check_count("window", self.window, 1)
        check_count("extended_window", self.extended_window, self.window)
        check_count("unfocused_heads", self.unfocused_heads, 0)
        check_kernel("kernel", self.kernel)
        check_choice("pooling", self.pooling, ("max", "avg"))
        check_choice("importance", self.importance, ("group", "query"))
        check_share("forced_share", self.forced_share)
        check_number("novelty_weight", self.novelty_weight, 0)

    def init(self, config: ModelConfig, batch: int, length: int) -> Array:
        """No layer has chosen anything yet."""
        return jnp.zeros((batch, length), jnp.int32)

    def score(self, seen: Observation, carry: Array) -> tuple[Scores, Array]:
        """Attention with coverage across heads as ``base``, plus novelty across layers as ``final``."""
        own, extended, importance = self._attention(seen)
        prefix = seen.lengths - self.window
        inside = jnp.arange(own.shape[-1]) < prefix[:, None, None]
        unfocused = self._unfocused(seen, own, inside)
        base = pool_scores(jnp.where(unfocused, extended, own), prefix, self.kernel, self.pooling)
        coverage = carry / (seen.layer + 1)  # below 1
        focus = importance * (1 - coverage)
        return Scores(final=base + self.novelty_weight * focus[:, None], base=base), carry

    def forced(self, budget: Array) -> Array:
        """The window, and ``forced_share`` of the budget beside it."""
        share = jnp.floor(self.forced_share * budget.astype(jnp.float32)).astype(jnp.int32)
        return jnp.minimum(self.window + share, budget)

    def after(self, kept: Array, carry: Array) -> Array:
        """Counts one more layer for every token that a head of it keeps."""
        return carry + jnp.any(kept, axis=1)

    def _attention(self, seen: Observation) -> tuple[Array, Array, Array]:
        """Mean attention of window and extended window [B, K, T] (eq. 8, 11), and importance [B, T] (eq. 13)."""

        def recent(weights):  # [W, S], those of the shorter window
            at = lax.broadcasted_iota(jnp.int32, weights.shape, 0)
            return jnp.where(at >= weights.shape[0] - self.window, weights, 0)

        def reduce(weights, looks):  # [G, W, S]
            grouped = jnp.sum(weights, axis=0) / seen.group
            return jnp.sum(recent(grouped), axis=0), jnp.sum(grouped, axis=0)

        def rivals(weights):
            each = self.importance == "query"
            return recent(jnp.max(weights, axis=0) if each else jnp.sum(weights, axis=0) / seen.group)

        (own, extended), importance = seen.window_scores(self.extended_window, reduce, rivals)
        rows = jnp.minimum(seen.lengths, self.window)
        extended_rows = jnp.minimum(seen.lengths, self.extended_window)
        return own / rows[:, None, None], extended / extended_rows[:, None, None], importance / rows[:, None]

    def _unfocused(self, seen: Observation, scores: Array, inside: Array) -> Array:
        """Marks bool [B, K, 1] the heads whose scores vary least over the tokens (eq. 10)."""
        count = jnp.maximum(jnp.sum(inside, axis=-1), 1)
        mean = jnp.sum(jnp.where(inside, scores, 0), axis=-1) / count
        deviations = jnp.where(inside, scores - mean[..., None], 0)
        variance = jnp.sum(deviations * deviations, axis=-1) / count  # ranks as the standard deviation does
        ranked = ordered_keys(-seen.all_heads(variance))
        return seen.own_heads(top_k_mask(ranked, self.unfocused_heads, implementation="xla"))[..., None]


def KVec(
    budget: Any,
    *,
    window: int = 16,
    extended_window: int = 32,
    unfocused_heads: int = 3,
    novelty_weight: float = 1.0,
    forced_share: float = 0.25,
    kernel: int = 7,
    pooling: Literal["max", "avg"] = "max",
    importance: Literal["group", "query"] = "group",
) -> Policy:
    """Coverage across heads and layers on top of window attention, https://arxiv.org/abs/2606.29563.

    * The base score is SnapKV's, of the last ``window`` queries (eq. 8).
    * Across heads: the ``unfocused_heads`` heads of a layer whose scores vary least take the mean over the last
      ``extended_window`` queries instead (eq. 10 and 11).
    * Across layers: a token's focus is its importance to any head times the share of earlier layers that did not keep
      it (eq. 12 to 15); ``novelty_weight`` times the focus is added to every head's score.
    * ``forced_share`` of the budget is placed by the base score alone (eq. 16), the rest by the sum.

    Choices that the paper leaves open: heads are key-value heads, and attention is averaged over a group's query heads
    first; the base score is max-pooled over ``kernel`` neighbours, focus is not; the standard deviation is that of
    the unpooled scores; the last ``window`` tokens are kept by every head, inside the budget; forced tokens come before
    any score (the paper sets them to 1.0, which a sum may exceed); ``unfocused_heads`` beyond the number of
    heads means all of them. The count of layers is carried per row of the batch.

    Args:
        budget: See ``Policy``.
        window: O, queries that look.
        extended_window: O', queries that look for the unfocused heads.
        unfocused_heads: delta.
        novelty_weight: lambda.
        forced_share: beta.
        kernel: Neighbours that are pooled.
        pooling: ``"max"`` or ``"avg"``.
        importance: Whether eq. 13 takes its maximum over the key-value heads (``"group"``) or over all query heads.

    Example:
        >>> KVec(128).scorer.window
        16
    """
    scorer = Coverage(
        window, extended_window, unfocused_heads, novelty_weight, forced_share, kernel, pooling, importance
    )
    return Policy(scorer=scorer, budget=budget, name="kvec")
