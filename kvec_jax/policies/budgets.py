"""Budgets: how many tokens each layer's key-value heads keep, on average over the heads."""

import dataclasses
import numbers

import jax.numpy as jnp
import numpy as np

from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class Even:
    """The same budget for every layer.

    Args:
        tokens: An ``int`` is a number of tokens per key-value head, everything that is always kept included. A ``float``
            in (0, 1] is a share of each prompt's own length, rounded half up, at least one token.

    Raises:
        TypeError, ValueError: If it is neither.
    """

    tokens: int | float

    # Whether all layers have the same budget, so that segments of equal size hold what they keep.
    even = True

    def __post_init__(self):
        check_tokens(self.tokens)

    def per_layer(self, lengths: Array, layers: int) -> Array:
        """Budget int32 [layers, B] of rows with ``lengths`` [B]."""
        tokens = jnp.minimum(_resolve(self.tokens, lengths), lengths)
        return jnp.broadcast_to(tokens, (layers, *lengths.shape)).astype(jnp.int32)

    def most(self, length: int) -> int:
        """Largest budget that a layer may get, for prompts of up to ``length`` tokens; static."""
        return int(np.minimum(_resolve(self.tokens, np.int32(length)), length))

    def total(self, length: int, layers: int) -> int:
        """Largest sum of the layers' budgets, for prompts of up to ``length`` tokens; static."""
        return layers * self.most(length)


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


def _resolve(tokens: int | float, lengths):
    """Tokens for prompts of the given lengths (numpy or jax); a share is rounded half up."""
    if isinstance(tokens, numbers.Integral):
        return tokens + 0 * lengths
    xp = np if isinstance(lengths, np.generic) else jnp
    return xp.maximum(xp.floor(xp.float32(tokens) * lengths.astype(xp.float32) + xp.float32(0.5)), 1).astype(xp.int32)
