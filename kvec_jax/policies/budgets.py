"""Budgets: how many tokens each layer's key-value heads keep, on average over the heads."""

import dataclasses
import numbers
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvec_jax.arguments import check_count
from kvec_jax.select import ordered_keys, top_k_mask
from kvec_jax.typing import Array


class BudgetRule(Protocol):
    """Divides a budget over the layers. A frozen dataclass, so that it can be a static argument of ``jit``.

    Attributes:
        tokens: Tokens per key-value head, on average over the layers: an int, or a share of the prompt.
        even: Whether all layers get the same, so that segments of one size hold what they keep.
    """

    tokens: int | float
    even: bool

    def per_layer(self, lengths: Array, layers: int) -> Array:
        """Budgets int32 [layers, B] of rows with ``lengths`` [B]; none is larger than the row."""

    def most(self, length: int, layers: int) -> int:
        """No less than any layer gets, for prompts of up to ``length`` tokens; static."""

    def total(self, length: int, layers: int) -> int:
        """No less than the sum over the layers, for prompts of up to ``length`` tokens; static."""


@dataclasses.dataclass(frozen=True)
class Even:
    """The same budget for every layer.

    Args:
        tokens: An ``int`` is a number of tokens per key-value head, everything that is always kept included. A
            ``float`` in (0, 1] is a share of each prompt's own length, rounded half up, at least one token.

    Raises:
        TypeError, ValueError: If it is neither.
    """

    tokens: int | float
    even = True

    def __post_init__(self):
        check_tokens(self.tokens)

    def per_layer(self, lengths: Array, layers: int) -> Array:
        """See ``BudgetRule``."""
        tokens = jnp.minimum(resolve_tokens(self.tokens, lengths), lengths)
        return jnp.broadcast_to(tokens, (layers, *lengths.shape)).astype(jnp.int32)

    def most(self, length: int, layers: int) -> int:
        """See ``BudgetRule``."""
        return most_tokens(self.tokens, length)

    def total(self, length: int, layers: int) -> int:
        """See ``BudgetRule``."""
        return layers * most_tokens(self.tokens, length)


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Budgets given layer by layer.

    Args:
        budgets: Tokens per key-value head of each layer that compresses.

    Raises:
        ValueError: For a budget below 1; when used, if there are not as many as layers.
    """

    budgets: tuple[int, ...]
    even = False

    def __post_init__(self):
        object.__setattr__(self, "budgets", tuple(self.budgets))
        for budget in self.budgets:
            check_count("budgets", budget, 1)

    @property
    def tokens(self) -> int:
        """The smallest, which must hold what is always kept."""
        return min(self.budgets)

    def per_layer(self, lengths: Array, layers: int) -> Array:
        """See ``BudgetRule``."""
        if len(self.budgets) != layers:
            raise ValueError(f"budgets: expected one for each of {layers} layers, got {len(self.budgets)}")
        return jnp.minimum(jnp.array(self.budgets, jnp.int32)[:, None], lengths)

    def most(self, length: int, layers: int) -> int:
        """See ``BudgetRule``."""
        return min(max(self.budgets), length)

    def total(self, length: int, layers: int) -> int:
        """See ``BudgetRule``."""
        return sum(min(budget, length) for budget in self.budgets)


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """Falls linearly from the first layer to the last, as in PyramidKV (https://arxiv.org/abs/2406.02069, eq. 3-5).

    With b = tokens - window, the last layer keeps about b / beta entries beside the window and the first
    2 b - b / beta, in equal whole steps; the first never more than the prompt has. What the steps' rounding lacks
    goes to the first layers, one entry each, and what it has too much is taken from the last, so that the sum is that
    of an even budget (that of the official code may differ by some entries).

    Args:
        tokens: See ``Even``.
        window: Tokens that are always kept, inside the budget.
        beta: How steep; 1 is flat.
    """

    tokens: int | float
    window: int = 32
    beta: int = 20
    even = False

    def __post_init__(self):
        check_tokens(self.tokens)
        check_count("beta", self.beta, 1)

    def per_layer(self, lengths: Array, layers: int) -> Array:
        """See ``BudgetRule``."""
        budget = jnp.minimum(resolve_tokens(self.tokens, lengths), lengths)
        average = jnp.maximum(budget - self.window, 0)
        low = average // self.beta
        high = jnp.minimum(2 * average - low, jnp.maximum(lengths - self.window, 0))
        low = 2 * average - high
        step = (high - low) // max(layers - 1, 1)
        number = jnp.arange(layers)[:, None]
        entries = high - number * step
        missing = layers * average - jnp.sum(entries, axis=0)
        return settle(entries, missing, jnp.maximum(lengths - self.window, 0)) + (budget - average)

    def most(self, length: int, layers: int) -> int:
        """See ``BudgetRule``."""
        return min(2 * most_tokens(self.tokens, length) + layers, length)

    def total(self, length: int, layers: int) -> int:
        """See ``BudgetRule``."""
        return layers * most_tokens(self.tokens, length)


@dataclasses.dataclass(frozen=True)
class Weighted:
    """In proportion to calibrated weights of the layers, within bounds: CompressKV's algorithm 1.

    B_l = clip(low + round(weight_l (L tokens - L low)), low, high tokens). What clipping and rounding leave over is
    given one by one to the layers in order of falling weight (or taken in order of rising weight) until the sum is
    exact. A layer never gets more than the prompt has; what it can't use goes to the others.

    Args:
        weights: One for each layer that compresses; they are divided by their sum.
        tokens: See ``Even``.
        low: Least of a layer.
        high: Most of a layer, as a multiple of ``tokens``.
    """

    weights: tuple[float, ...]
    tokens: int | float
    low: int = 32
    high: int = 3
    even = False

    def __post_init__(self):
        check_tokens(self.tokens)
        check_count("low", self.low, 1)
        check_count("high", self.high, 1)
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        if min(self.weights, default=-1) < 0 or sum(self.weights) <= 0:
            raise ValueError("weights: expected numbers, 0 or more, that don't all vanish")

    def per_layer(self, lengths: Array, layers: int) -> Array:
        """See ``BudgetRule``."""
        if len(self.weights) != layers:
            raise ValueError(
                f"weights: expected one for each of {layers} layers, got {len(self.weights)} (of another model?)"
            )
        weights = np.array(self.weights) / np.sum(self.weights)
        falling = np.argsort(-weights, kind="stable")
        tokens = jnp.minimum(resolve_tokens(self.tokens, lengths), lengths)
        low = jnp.minimum(self.low, tokens)
        high = jnp.minimum(self.high * tokens, lengths)
        shares = jnp.round(jnp.asarray(weights[falling], jnp.float32)[:, None] * (layers * (tokens - low)))
        budgets = jnp.clip(low + shares.astype(jnp.int32), low, high)
        budgets = settle(budgets, layers * tokens - jnp.sum(budgets, axis=0), high, low)
        return budgets[np.argsort(falling)]

    def most(self, length: int, layers: int) -> int:
        """See ``BudgetRule``."""
        return min(self.high * most_tokens(self.tokens, length), length)

    def total(self, length: int, layers: int) -> int:
        """See ``BudgetRule``."""
        return layers * most_tokens(self.tokens, length)


def settle(budgets: Array, missing: Array, high: Array, low: Array | int = 0) -> Array:
    """Makes the sum of ``budgets`` [L, B] exact by ``missing`` [B] steps of one, within the bounds.

    Steps up go round from the first layer on, steps down from the last layer back.
    """

    def unsettled(state):
        budgets, missing = state
        open_up = jnp.any((missing > 0) & jnp.any(budgets < high, axis=0))
        return open_up | jnp.any((missing < 0) & jnp.any(budgets > low, axis=0))

    def turn(state):
        budgets, missing = state
        up, down = budgets < high, budgets > low
        add = up & (jnp.cumsum(up, axis=0) <= missing)
        take = down & (jnp.cumsum(down[::-1], axis=0)[::-1] <= -missing)
        change = add.astype(jnp.int32) - take.astype(jnp.int32)
        return budgets + change, missing - jnp.sum(change, axis=0)

    return lax.while_loop(unsettled, turn, (budgets, missing))[0]


def largest_remainder(shares: Array, total: Array) -> Array:
    """Whole numbers near ``shares`` float32 [B, n] that add up to ``total`` int32 [B]; ties: lower index."""
    whole = jnp.floor(shares)
    left = total - jnp.sum(whole, axis=-1).astype(jnp.int32)
    return whole.astype(jnp.int32) + top_k_mask(ordered_keys(shares - whole), left, implementation="xla")


def check_tokens(tokens) -> None:
    """Raises unless ``tokens`` is a number of tokens or a share of the prompt."""
    if isinstance(tokens, bool) or not isinstance(tokens, numbers.Real):
        raise TypeError(
            f"budget: expected tokens per key-value head (int) or a share of the prompt (float), got {tokens!r}"
        )
    if isinstance(tokens, numbers.Integral):
        if tokens < 1:
            raise ValueError(f"budget: expected at least 1 token per key-value head, got {tokens}")
    elif not 0 < tokens <= 1:
        raise ValueError(f"budget: expected a share of the prompt in (0, 1], or an int of tokens, got {tokens}")


def resolve_tokens(tokens: int | float, lengths: Array) -> Array:
    """Tokens for prompts of the given ``lengths``; a share is rounded half up."""
    if isinstance(tokens, numbers.Integral):
        return jnp.full_like(lengths, tokens)
    return jnp.maximum(jnp.floor(jnp.float32(tokens) * lengths.astype(jnp.float32) + 0.5), 1).astype(jnp.int32)


def most_tokens(tokens: int | float, length: int) -> int:
    """``resolve_tokens`` of a prompt of ``length``, within it; static."""
    if isinstance(tokens, numbers.Integral):
        return min(int(tokens), length)
    share = np.floor(np.float32(tokens) * np.float32(length) + np.float32(0.5))
    return min(max(int(share), 1), length)
