"""Rows of keys and values in the order of an index, on a TPU.

The rows stay where they are, in HBM; one program fetches those of a block one by one, all copies under way at once, and
writes them as they lie in the cache. A copy must begin at a whole 32-bit line of memory, in which bfloat16 rows lie in
pairs: the pair is fetched, and the half that was meant is taken.

For each of B rows of the batch, with S rows chosen of two arrays: bytes that must move, 2 S D in and as many out, and 4
S of index (twice as many in for bfloat16, where no two rows of a pair were chosen). No operations but the choice of a
half.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvec_jax.typing import Array

_BLOCK = 128
# Rows whose copies are started in one round of the loop.
_TOGETHER = 8


def refusal(keys: Array, values: Array, index: Array) -> str | None:
    """Why these arrays can't be had, or ``None``."""
    if keys.dtype != values.dtype or keys.dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16 keys and values of one type, got {keys.dtype} and {values.dtype}"
    return None if index.size and keys.shape[1] else "expected rows to choose from and to choose, got none"


def pack_rows(keys: Array, values: Array, index: Array, interpret: bool) -> tuple[Array, Array]:
    """See ``kvec_jax.pack_rows.pack_rows``; every index is one of a row."""
    B, S = index.shape
    paired = keys.dtype == jnp.bfloat16
    T, D = keys.shape[1:]
    if paired and T % 2:
        keys, values = (jnp.pad(x, [(0, 0), (0, 1), (0, 0)]) for x in (keys, values))
        T += 1
    blocks = pl.cdiv(S, _BLOCK)
    index = jnp.pad(index, [(0, 0), (0, blocks * _BLOCK - S)]) + T * jnp.arange(B, dtype=jnp.int32)[:, None]
    keys, values = (x.reshape(B * T, D) for x in (keys, values))
    index = index.reshape(B * blocks, 1, _BLOCK)
    block = pl.BlockSpec((1, _BLOCK, D), lambda i: (i, 0, 0))
    packed = jax.ShapeDtypeStruct((B * blocks, _BLOCK, D), keys.dtype)
    fetched = pltpu.VMEM((2, _BLOCK, D), jnp.int32 if paired else keys.dtype)
    outputs = pl.pallas_call(
        functools.partial(_kernel, paired=paired),
        grid=(B * blocks,),
        in_specs=[
            pl.BlockSpec((1, 1, _BLOCK), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((1, _BLOCK, 1), lambda i: (i, 0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=[block, block],
        out_shape=[packed, packed],
        scratch_shapes=[fetched, pltpu.SemaphoreType.DMA((2,))],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="pack_rows",
    )(index, index.reshape(-1, _BLOCK, 1), keys, values)
    keys, values = (x.reshape(B, -1, D)[:, :S] for x in outputs)
    return keys, values


def _kernel(index, index_lines, keys, values, packed_keys, packed_values, fetched, semaphores, *, paired):
    """Refs: [1, 1, S]; [1, S, 1]; [rows, D] twice; [1, S, D] twice; [2, S, D]; [2]."""

    def copies(i):
        at = index[0, 0, i]
        for array, rows in enumerate((keys, values)):
            source = rows.bitcast(jnp.int32).at[pl.ds(at // 2, 1)] if paired else rows.at[pl.ds(at, 1)]
            target = fetched.at[array, pl.ds(i, 1)]
            yield pltpu.make_async_copy(source, target, semaphores.at[array])

    def start(i, _):
        for row in range(_TOGETHER):
            for copy in copies(i * _TOGETHER + row):
                copy.start()

    lax.fori_loop(0, _BLOCK // _TOGETHER, start, None)
    for array in range(2):
        # A semaphore counts bytes: all copies of an array are waited for at once.
        everything = fetched.at[array]
        pltpu.make_async_copy(everything, everything, semaphores.at[array]).wait()
    for array, packed in enumerate((packed_keys, packed_values)):
        packed[0] = _half(fetched[array], index_lines[0] % 2) if paired else fetched[array]


def _half(pairs: Array, which: Array) -> Array:
    """bfloat16 [S, D]: the low (0) or high (1) half of each row of words [S, D]; ``which`` is [S, 1]."""
    word = jnp.where(which == 0, pairs << 16, pairs & jnp.int32(-65536))
    return lax.bitcast_convert_type(word, jnp.float32).astype(jnp.bfloat16)
