"""Methods by attention received: TOVA (from the last token) and observed attention (from all tokens)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_flag
from kvec_jax.policies.base import Observation, Policy, Stateless
from kvec_jax.typing import Array

# Queries that look at the keys at a time.
_QUERY_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class LastAttention(Stateless):
    """Attention of the last token, averaged over all heads of the layer."""

    window: int = 1
    repeatable = True

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Mean over the N query heads, the same for every key-value head, float32 [B, K, T]."""

        def total(weights, looks):
            return jnp.sum(jnp.sum(weights, axis=0), axis=0)

        heads = seen.window_scores(1, total) / seen.group
        return seen.per_head(seen.sum_over_heads(heads) / seen.config.all_key_value_heads), carry


@dataclasses.dataclass(frozen=True)
class ReceivedAttention(Stateless):
    """Attention that an entry receives from all tokens of the prompt, block by block of queries."""

    per_query: bool = True

    def __post_init__(self):
        check_flag("per_query", self.per_query)

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Sum over the queries, mean over the group, float32 [B, K, T]."""
        B, K, T, _ = seen.keys.shape
        block = min(_QUERY_BLOCK, T)

        def add(i, total):
            start = jnp.minimum(i * block, T - block)
            at = start + jnp.arange(block)
            # Padding, and queries that the block before had already, look at nothing.
            looks = (at >= i * block) & (at < seen.lengths[:, None])

            def received(weights, looks):
                return jnp.sum(jnp.sum(weights, axis=0) / seen.group, axis=0)

            return total + seen.block_scores(start, jnp.where(looks, at, -1), received)

        blocks = -(-jnp.max(seen.lengths) // block)
        total = lax.fori_loop(0, blocks, add, jnp.zeros((B, K, T)))
        if self.per_query:
            total = total / jnp.maximum(seen.lengths[:, None, None] - jnp.arange(T), 1)
        return total, carry


def TOVA(budget: Any, *, sinks: int = 0) -> Policy:
    """Keeps what the last token attends to, https://arxiv.org/abs/2401.06104; all heads of a layer keep the same.

    Args:
        budget: See ``Policy``.
        sinks: First tokens that are always kept.
    """
    return Policy(scorer=LastAttention(), budget=budget, sinks=sinks, name="tova")


def ObservedAttention(budget: Any, *, per_query: bool = True, sinks: int = 0) -> Policy:
    """Keeps what all tokens of the prompt attend to, after H2O (https://arxiv.org/abs/2306.14048).

    H2O adds attention up while it generates; here all of the prompt is added up once, nothing T x T being held. It
    takes about twice the time of the prompt's attention again.

    Args:
        budget: See ``Policy``.
        per_query: Whether to divide by the number of queries that can see an entry, as kvpress does; H2O's plain sum
            favours early entries.
        sinks: First tokens that are always kept.
    """
    return Policy(scorer=ReceivedAttention(per_query=per_query), budget=budget, sinks=sinks, name="observed")
