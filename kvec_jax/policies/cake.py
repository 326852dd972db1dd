"""CAKE: layers share a budget by how spread and how changing their attention is, https://arxiv.org/abs/2503.12491."""

import dataclasses

import jax.numpy as jnp

from kvec_jax.arguments import check_count, check_kernel, check_number
from kvec_jax.policies.base import Observation, Policy, Scores, Stateless
from kvec_jax.policies.budgets import Even, largest_remainder, most_tokens, resolve_tokens, settle
from kvec_jax.scores import pool_scores
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class ShiftingAttention(Stateless):
    """Mean of the window's attention plus ``gamma`` times its variance; and the layer's preference; see ``CAKE``."""

    window: int = 32
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self):
        check_count("window", self.window, 2)
        check_kernel("kernel", self.kernel)
        check_number("gamma", self.gamma, 0)
        check_number("tau1", self.tau1, 0, above=True)
        check_number("tau2", self.tau2, 0, above=True)

    def score(self, seen: Observation, carry: None) -> tuple[Scores, None]:
        """Pooled indicator float32 [B, K, T], and the layer's preference [B]."""

        def reduce(weights, looks):  # [G, W, S]
            rows = jnp.maximum(jnp.sum(looks.astype(jnp.float32)), 2)
            mean = jnp.sum(weights, axis=1) / rows
            spread = jnp.sum(jnp.where(looks, jnp.square(weights - mean[:, None]), 0), axis=1) / (rows - 1)
            entropy = -jnp.sum(jnp.sum(weights * jnp.log(weights + 1e-10), axis=0), axis=0)
            return jnp.sum(mean + self.gamma * spread, axis=0) / seen.group, entropy, jnp.sum(spread, axis=0)

        indicator, entropy, spread = seen.window_scores(self.window, reduce)
        prefix = seen.lengths - self.window
        inside = jnp.arange(indicator.shape[-1]) < prefix[:, None, None]
        entropy, spread = (seen.sum_over_heads(jnp.sum(jnp.where(inside, x, 0), axis=2)) for x in (entropy, spread))
        preference = jnp.maximum(entropy, 0) ** (1 / self.tau1) * jnp.maximum(spread, 0) ** (1 / self.tau2)
        return Scores(pool_scores(indicator, prefix, self.kernel, "avg"), preference=preference), carry


@dataclasses.dataclass(frozen=True)
class Preference(Even):
    """Divides the budget over the layers in proportion to what they want, as far as they have been read.

    Before any is read each is promised the average, as in ``Even``; ``share`` says what each gets.

    Args:
        tokens: See ``Even``.
        window: Tokens that every layer keeps, inside the budget.
    """

    window: int = 32
    even = False

    def most(self, length: int, layers: int) -> int:
        """See ``BudgetRule``."""
        return min(layers * most_tokens(self.tokens, length), length)

    def share(self, preferences: Array, lengths: Array) -> Array:
        """Budgets int32 [L, B] from the layers' preferences float32 [L, B]; those of layers not yet read are negative.

        Proportional shares, made whole numbers with the same sum (largest remainder), none beyond the prompt; what that
        leaves is given one by one to all layers that can take it.
        """
        layers = preferences.shape[0]
        tokens = jnp.minimum(resolve_tokens(self.tokens, lengths), lengths)
        window = jnp.minimum(self.window, tokens)
        places = (tokens - window) * layers
        most = jnp.where(preferences >= 0, lengths - window, 0)
        weights = jnp.maximum(preferences, 0)
        total = jnp.sum(weights, axis=0)
        shares = weights / jnp.where(total == 0, 1, total) * places
        budgets = jnp.minimum(largest_remainder(shares.T, places).T, most)
        return settle(budgets, places - jnp.sum(budgets, axis=0), most) + window


def CAKE(
    budget: int | float,
    *,
    window: int = 32,
    kernel: int = 5,
    gamma: float = 200.0,
    tau1: float = 1.0,
    tau2: float = 1.0,
) -> Policy:
    """Cascading and adaptive eviction, https://arxiv.org/abs/2503.12491.

    A layer's preference is the entropy of the window's attention over the keys before it, to the power 1 / tau1, times
    the sum of its variance over the window, to the power 1 / tau2; the budget is divided in proportion. An entry's
    score is its mean attention plus ``gamma`` times its variance, pooled and averaged over a group's query heads. All
    heads of a layer keep the same number. Budgets are divided anew after each layer, and the layers before it cut down.

    Args:
        budget: Tokens per key-value head on average over the layers, or a share of the prompt.
        window: Queries that look.
        kernel: Neighbours that are average-pooled.
        gamma: Weight of the variance.
        tau1: Temperature of the entropy; the paper tunes both for each model and budget.
        tau2: Temperature of the variance.
    """
    scorer = ShiftingAttention(window, kernel, gamma, tau1, tau2)
    return Policy(scorer=scorer, budget=Preference(budget, window), name="cake")
