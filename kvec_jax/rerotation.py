"""Kept entries at new positions: keys are turned on, so that texts may be longer than the model's context.

RoPE turns by position, and turns add up: a key that was turned to position j is brought to position i by turning it
i - j further. The entries of each head get the positions 0, 1, 2, ... in their order, and new tokens come after them.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvec_jax.cache import CompressedKV
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Rotation
from kvec_jax.typing import Array


def turn(config: ModelConfig, keys: Array, by: Array, layer: Array) -> Array:
    """Keys [B, K, S, D] of one layer, after RoPE, turned further ``by`` int32 [B, K, S] positions; back if negative."""
    B, K, S, D = keys.shape
    # The factor that some scalings put on cosines and sines is in the keys already.
    turning = dataclasses.replace(config, rope=dataclasses.replace(config.rope, attention_factor=1.0))
    rotation = Rotation(turning, by.reshape(B * K, S))
    return rotation(keys.reshape(B * K, 1, S, D), jnp.bool_(False), layer).reshape(B, K, S, D)


def move_to_front(cache: CompressedKV, config: ModelConfig) -> CompressedKV:
    """A cache of equal segments that a policy just made, with each head's entries at the positions 0, 1, 2, ..."""
    B, L, K = cache.counts.shape
    S, D = cache.segment_rows, cache.keys.shape[-1]
    by = jnp.arange(S) - cache.positions.reshape(B, L, K, S)

    def turn_layer(_, inputs):
        layer, keys, by = inputs
        return None, turn(config, keys, by, layer)

    layers = jnp.moveaxis(cache.keys.reshape(B, L, K, S, D), 1, 0), jnp.moveaxis(by, 1, 0)
    _, keys = lax.scan(turn_layer, None, (jnp.arange(L), *layers))
    held = cache.counts[:, 0, 0]  # the same for all heads
    return dataclasses.replace(
        cache, keys=jnp.moveaxis(keys, 0, 1).reshape(cache.keys.shape), shift=cache.next_position - held
    )
