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
        kind: ``"default"``, ``"linear"`` or ``"llama3"``.
        factor: How many times longer than the original context (scaled kinds).
        low_freq_factor, high_freq_factor: Bounds of llama3's interpolation band.
        original_max_position: Context length before scaling.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Returns the rotation per position of each of the ``head_dim / 2`` pairs, float32."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
        frequencies = 1.0 / np.power(np.float32(self.theta), exponents)
        return _SCALINGS[self.kind](self, frequencies).astype(np.float32)


def _llama3(rope: Rope, frequencies: np.ndarray) -> np.ndarray:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, a band between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = np.clip((rope.original_max_position / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


_SCALINGS = {
    "default": lambda rope, frequencies: frequencies,
    "linear": lambda rope, frequencies: frequencies / rope.factor,
    "llama3": _llama3,
}


def angles(positions: Array, frequencies: np.ndarray) -> tuple[Array, Array]:
    """Cosines and sines of positions [B, T], each float32 [B, T, D/2]."""
    phase = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)
    return jnp.cos(phase), jnp.sin(phase)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates ``x`` [B, heads, T, D] by ``cos``, ``sin`` [B, T, D/2]; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
