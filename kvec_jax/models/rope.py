"""Rotary position embedding (RoPE), https://arxiv.org/abs/2104.09864, in the rotate-half form."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """What sets the rotation frequencies; hashable, so that it can be a static argument.

    Attributes:
        theta: Base of the frequencies.
        kind: ``"default"``, ``"linear"``, ``"llama3"``, ``"yarn"`` or ``"longrope"``.
        factor: How many times longer than the original context (linear, llama3, yarn).
        low_freq_factor, high_freq_factor: Bounds of llama3's interpolation band.
        original_max_position: Context length before scaling (llama3, yarn).
        beta_fast, beta_slow: Rotations over the original context that bound yarn's interpolation band.
        truncate: Whether yarn rounds the band to whole pairs.
        pair_factors: Divisor of each pair's frequency (longrope).
        attention_factor: Factor on cosines and sines, so its square is on the logits of attention (yarn, longrope).
        fraction: Share of each head that is rotated; the dimensions after it pass unchanged.

    Example:
        >>> Rope(theta=100.0).inverse_frequencies(4)
        array([1. , 0.1], dtype=float32)
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    pair_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    fraction: float = 1.0

    def __post_init__(self):
        if self.kind not in _SCALINGS:
            raise ValueError(f"kind: expected one of {', '.join(sorted(_SCALINGS))}, got {self.kind!r}")
        if not self.theta > 1:
            raise ValueError(f"theta: expected a number above 1, got {self.theta!r}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction: expected a number in (0, 1], got {self.fraction!r}")

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Returns the rotation per position of each rotated pair, float32 [``fraction * head_dim / 2``]."""
        rotated = int(head_dim * self.fraction)
        exponents = np.arange(0, rotated, 2, dtype=np.float32) / rotated
        frequencies = 1.0 / np.power(np.float32(self.theta), exponents)
        return _SCALINGS[self.kind](self, frequencies).astype(np.float32)


def _llama3(rope: Rope, frequencies: np.ndarray) -> np.ndarray:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, a band between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = np.clip((rope.original_max_position / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(rope: Rope, frequencies: np.ndarray) -> np.ndarray:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): a linear ramp from kept to stretched frequencies."""
    pairs = len(frequencies)

    def pair_turning(rotations: float) -> float:
        """The pair, as a real number, that turns ``rotations`` times over the original context."""
        return pairs * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    stretched = np.clip((np.arange(pairs, dtype=np.float32) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies


def _longrope(rope: Rope, frequencies: np.ndarray) -> np.ndarray:
    """LongRoPE (https://arxiv.org/abs/2402.13753): every pair is stretched by a factor found by search."""
    if len(rope.pair_factors) != len(frequencies):
        raise ValueError(f"pair_factors: expected {len(frequencies)} numbers, got {len(rope.pair_factors)}")
    return frequencies / np.asarray(rope.pair_factors, np.float32)


_SCALINGS = {
    "default": lambda rope, frequencies: frequencies,
    "linear": lambda rope, frequencies: frequencies / rope.factor,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def angles(positions: Array, rope: Rope, head_dim: int) -> tuple[Array, Array]:
    """Cosines and sines of positions [B, T], each float32 [B, T, rotated pairs], with the attention factor."""
    phase = positions[..., None].astype(jnp.float32) * jnp.asarray(rope.inverse_frequencies(head_dim))
    return jnp.cos(phase) * rope.attention_factor, jnp.sin(phase) * rope.attention_factor


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates ``x`` [B, heads, T, D] by ``cos``, ``sin`` [B, T, D/2]; computed in float32, returned in x's dtype.

    With fewer than D/2 pairs only the first dimensions of each head are rotated; the others pass unchanged.
    """
    pairs = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second = wide[..., :pairs], wide[..., pairs : 2 * pairs]
    cos, sin = cos[:, None], sin[:, None]
    rotated = (first * cos - second * sin, second * cos + first * sin, wide[..., 2 * pairs :])
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
