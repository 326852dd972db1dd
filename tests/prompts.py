"""Batches of random prompts, tiny models, and what the oracle sees of them; cached, as many tests share them."""

import functools

import jax.numpy as jnp
import numpy as np

from kvec_jax.testing import tiny_model
from tests.oracle.forward import forward, weights


@functools.cache
def model_of(seed: int = 0, **changes):
    """A tiny model and its weights in numpy."""
    model = tiny_model(seed, **changes)
    return model, weights(model)


@functools.cache
def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """``length`` random tokens, 1 to 254."""
    return tuple(np.random.default_rng([seed, length]).integers(1, 255, size=length).tolist())


def batch(lengths, T: int, seed: int = 0, pad: int = 0):
    """Right-padded tokens int32 [B, T] of ``prompt(length, seed)``, and the lengths."""
    tokens = np.full((len(lengths), T), pad, np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = prompt(length, seed)
    return jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)


@functools.cache
def trace_of(length: int, seed: int = 0, **changes):
    """The oracle's pass over ``prompt(length, seed)`` with ``model_of(**changes)``."""
    model, w = model_of(**changes)
    return forward(model.config, w, prompt(length, seed))


def as_lists(kept):
    """Kept positions as plain lists, which compare and print well."""
    return [[[int(p) for p in head] for head in layer] for layer in kept]
