"""Expected attention: what queries still to come will attend to, https://arxiv.org/abs/2510.00636."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_count, check_flag, check_number
from kvec_jax.models.rope import angles, rotate
from kvec_jax.policies.base import Observation, Policy, Stateless
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class FutureAttention(Stateless):
    """Attention under a Gaussian model of future queries; see ``ExpectedAttention``."""

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.01

    def __post_init__(self):
        check_count("future", self.future, 1)
        check_flag("covariance", self.covariance)
        check_flag("value_norm", self.value_norm)
        check_number("epsilon", self.epsilon, 0)

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Expected attention, times the norm of the value if asked, float32 [B, K, T]."""
        B, K, T, D = seen.keys.shape
        at = jnp.arange(T)
        counted = (at >= self.sinks) & (at < seen.lengths[:, None])  # [B, T]
        mean, spread = _statistics(seen.raw_queries, counted)
        rotation = self._mean_rotation(seen)  # [B, D, D]
        mean = jnp.einsum("BDE,BNE->BND", rotation, mean, precision=lax.Precision.HIGHEST)
        keys = seen.keys.astype(jnp.float32)
        grouped = mean.reshape(B, K, -1, D)
        logits = jnp.einsum("BKGD,BKTD->BKGT", grouped, keys, precision=lax.Precision.HIGHEST) * seen.scale
        if self.covariance:
            spread = jnp.einsum("BDE,BNEF,BHF->BNDH", rotation, spread, rotation, precision=lax.Precision.HIGHEST)
            spread = spread.reshape(B, K, -1, D, D)
            through = jnp.einsum("BKGDE,BKTE->BKGTD", spread, keys, precision=lax.Precision.HIGHEST)
            logits += jnp.sum(through * keys[:, :, None], axis=-1) * (seen.scale**2 / 2)
        logits = jnp.where(counted[:, None, None], logits, -jnp.inf)
        scores = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=2)
        if self.value_norm:
            scores = (scores + self.epsilon) * jnp.linalg.norm(seen.values.astype(jnp.float32), axis=-1)
        return scores, carry

    def _mean_rotation(self, seen: Observation) -> Array:
        """RoPE as a matrix [B, D, D], averaged over the ``future`` positions after the prompt."""
        D = seen.keys.shape[-1]
        positions = seen.lengths[:, None] + jnp.arange(self.future)
        cos, sin = (jnp.mean(x, axis=1, keepdims=True) for x in angles(positions, seen.config.rope, D))
        basis = jnp.broadcast_to(jnp.eye(D)[None, :, None], (cos.shape[0], D, 1, D))
        return rotate(basis, cos, sin)[:, :, 0].swapaxes(1, 2)


def _statistics(queries: Array, counted: Array) -> tuple[Array, Array]:
    """Mean [B, N, D] and covariance [B, N, D, D] of the ``counted`` bool [B, T] queries [B, N, T, D]."""
    queries = queries.astype(jnp.float32)
    weight = counted[:, None, :, None]
    count = jnp.maximum(jnp.sum(weight, axis=2), 1)  # [B, 1, 1]
    mean = jnp.sum(jnp.where(weight, queries, 0), axis=2) / count
    centred = jnp.where(weight, queries - mean[:, :, None], 0)
    spread = jnp.einsum("BNTD,BNTE->BNDE", centred, centred, precision=lax.Precision.HIGHEST)
    return mean, spread / count[..., None]


def ExpectedAttention(
    budget: Any,
    *,
    sinks: int = 4,
    future: int = 512,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.01,
) -> Policy:
    """Keeps what future queries are expected to attend to, https://arxiv.org/abs/2510.00636.

    The queries of the prompt (before RoPE, the sinks left out) give a mean and a covariance; rotated by the average
    rotation of the next ``future`` positions they give the expectation of exp(q k) in closed form, which is normalised
    over the keys, averaged over a group's query heads, and multiplied by the norm of the value.

    Args:
        budget: See ``Policy``.
        sinks: First tokens, which are always kept and left out of the statistics.
        future: Positions that are averaged over.
        covariance: Whether to use the covariance.
        value_norm: Whether to multiply by the values' L2 norm.
        epsilon: Added to the attention before that, so that no entry is lost because no query is expected to look at
            it. kvpress has 0 as the default and 0.01 in its presets that end in ``e2``; 0 was no better than chance at
            times in what was measured here (benchmarks/results/quality.md, protocol ``agnostic``).
    """
    scorer = FutureAttention(future=future, sinks=sinks, covariance=covariance, value_norm=value_norm, epsilon=epsilon)
    return Policy(scorer=scorer, budget=budget, sinks=sinks, name="expected")
