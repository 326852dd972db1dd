"""Counting the bytes that a kernel's grid moves."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from benchmarks.traffic import calls_in


def test_a_block_is_copied_whenever_its_index_changes():
    def kernel(a, b, c, out):
        out[...] = a[...] + b[...] + c[...]

    @jax.jit
    def add(a, b, c):
        return pl.pallas_call(
            kernel,
            grid=(3, 4),
            in_specs=[
                pl.BlockSpec((8, 128), lambda i, j: (i, 0)),  # stays while j goes on
                pl.BlockSpec((8, 128), lambda i, j: (0, j)),  # comes back for every i
                pl.BlockSpec((8, 128), lambda i, j: (0, 0)),  # stays
            ],
            out_specs=pl.BlockSpec((8, 128), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((24, 512), jnp.float32),
            name="add",
        )(a, b, c)

    shapes = (24, 128), (8, 512), (8, 128)
    (call,) = calls_in(add, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert (call.name, call.steps, call.blocks) == ("add", 12, ((8, 128),) * 4)
    assert call.moved == 8 * 128 * 4 * (3 + 12 + 1 + 12)
