"""Methods that look at keys alone, or at nothing: KNorm, KeyDiff, Random."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvec_jax.arguments import check_count
from kvec_jax.policies.base import Observation, Policy, Stateless
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class SmallKeys(Stateless):
    """Scores an entry by the norm of its key: the smaller the better."""

    repeatable = True

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Minus the L2 norms, float32 [B, K, T]."""
        return -jnp.linalg.norm(seen.keys.astype(jnp.float32), axis=-1), carry


@dataclasses.dataclass(frozen=True)
class DistinctKeys(Stateless):
    """Scores an entry by how little its key points the way that the keys point on average."""

    repeatable = True

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Minus the cosine of each key with the mean of the normalised keys, float32 [B, K, T]."""
        keys = seen.keys.astype(jnp.float32)
        directions = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
        real = jnp.arange(keys.shape[2]) < seen.lengths[:, None, None]
        mean = jnp.sum(jnp.where(real[..., None], directions, 0), axis=2, keepdims=True)
        mean = mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
        return -jnp.sum(directions * mean, axis=-1), carry


@dataclasses.dataclass(frozen=True)
class Chance(Stateless):
    """Scores by chance; an entry's score depends on the seed, its layer, head and position alone."""

    seed: int = 0

    def __post_init__(self):
        check_count("seed", self.seed, 0)

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Uniform numbers float32 [B, K, T], the same for every row."""
        B, K, T, _ = seen.keys.shape
        key = jax.random.fold_in(jax.random.key(self.seed), seen.layer)

        def draw(head, position):
            return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, head), position))

        heads = seen.own_heads(jnp.arange(seen.config.all_key_value_heads), axis=0)
        scores = jax.vmap(lambda head: jax.vmap(lambda at: draw(head, at))(jnp.arange(T)))(heads)
        return jnp.broadcast_to(scores, (B, K, T)), carry


def KNorm(budget: Any, *, sinks: int = 0) -> Policy:
    """Keeps the keys of smallest norm, https://arxiv.org/abs/2406.11430; norms are taken in float32.

    Args:
        budget: See ``Policy``.
        sinks: First tokens that are always kept.
    """
    return Policy(scorer=SmallKeys(), budget=budget, sinks=sinks, name="knorm")


def KeyDiff(budget: Any, *, sinks: int = 0) -> Policy:
    """Keeps the keys least similar to the mean of the normalised keys, https://arxiv.org/abs/2504.15364.

    Args:
        budget: See ``Policy``.
        sinks: First tokens that are always kept.
    """
    return Policy(scorer=DistinctKeys(), budget=budget, sinks=sinks, name="keydiff")


def Random(budget: Any, *, seed: int = 0, sinks: int = 0) -> Policy:
    """Keeps entries by chance: what a method must beat.

    Args:
        budget: See ``Policy``.
        seed: Of the random numbers.
        sinks: First tokens that are always kept.
    """
    return Policy(scorer=Chance(seed=seed), budget=budget, sinks=sinks, name="random")
