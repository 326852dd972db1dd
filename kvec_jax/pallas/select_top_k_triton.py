"""The k largest of a row, exactly, on a GPU, through Triton.

The k-th largest key is found four bits at a time: many programs, each with a block of a row, count how many of its keys
are at least each of fifteen candidates, the counts are added up, and the largest candidate that enough keys reach is
the next start; then, likewise, the rank below which so many of the keys equal to it lie as still fit. So that all of
the GPU works on a row however few there are, the counts of one step are one kernel.

For each row of S keys, bytes that must move: 4 S in, 4 S for ranks if they are not the places themselves, S out. What
moves is 4 S for each of 8 + log16 S steps, from the cache where the row fits. Operations that must run: a comparison
and an addition for each key and candidate, 30 S for each step.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvec_jax.pallas.triton_blocks import store_last
from kvec_jax.typing import Array

LOWEST = -(2**31)
_BITS = 4
_CANDIDATES = 1 << _BITS
_BLOCK = 1024


def refusal(keys: Array, rank: Array | None) -> str | None:
    """Why these arrays can't be had, or ``None``."""
    return None if keys.size else "expected rows with keys, got none"


def top_k_mask(keys: Array, k: Array, rank: Array | None, interpret: bool) -> Array:
    """See ``kvec_jax.pallas.select_top_k_tpu.top_k_mask``."""
    R, S = keys.shape
    operands = [keys] if rank is None else [keys, rank]
    zeros = jnp.zeros((R,), jnp.int32)

    def call(kernel, out_shape, *scalars, **static):
        return pl.pallas_call(
            functools.partial(kernel, ranked=rank is not None, **static),
            grid=(R, pl.cdiv(S, _BLOCK)),
            out_shape=out_shape,
            compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
            interpret=interpret,
            name="select_top_k",
        )(*scalars, *operands)

    def count(threshold, start, shift, of_ranks):
        """[R, candidates]: keys from start + (candidate << shift) up, or ranks of equal keys that lie below that."""
        shape = jax.ShapeDtypeStruct((R, pl.cdiv(S, _BLOCK), _CANDIDATES), jnp.int32)
        shift = jnp.full((R,), shift, jnp.int32)
        return jnp.sum(call(_count_kernel, shape, threshold, start, shift, of_ranks=of_ranks), axis=1)

    def key_step(i, threshold):
        shift = 32 - _BITS * (i + 1)
        enough = count(zeros, threshold, shift, False) >= k[:, None]
        best = jnp.sum(enough.astype(jnp.int32), axis=1) - 1  # what is enough for one is for all lower ones
        return threshold + (best << shift)

    threshold = lax.fori_loop(0, 32 // _BITS, key_step, jnp.full((R,), LOWEST, jnp.int32))
    above = jnp.where(threshold == 2**31 - 1, 0, count(zeros, threshold + 1, 0, False)[:, 0])
    room = k - above
    bits = S.bit_length() if rank is None else 31
    steps = pl.cdiv(bits, _BITS)

    def rank_step(i, limit):
        shift = _BITS * (steps - 1 - i)
        fits = count(threshold, limit, shift, True) <= room[:, None]
        most = jnp.where(shift + _BITS > 31, 7, _CANDIDATES - 1)  # 31 bits are all there are
        best = jnp.minimum(jnp.sum(fits.astype(jnp.int32), axis=1) - 1, most)
        return limit + (best << shift)

    limit = lax.fori_loop(0, steps, rank_step, zeros)
    mask = jax.ShapeDtypeStruct((R, S), jnp.int8)
    return call(_mark_kernel, mask, threshold, limit) != 0


def _count_kernel(threshold, start, shift, keys, *refs, ranked, of_ranks):
    """Refs: [R] three times; [R, S]; ranks likewise, if any; [R, blocks, candidates]."""
    row, block = pl.program_id(0), pl.program_id(1)
    key, rank, inside = _part(keys, refs, ranked)
    candidate = jnp.arange(_CANDIDATES)[:, None]
    if of_ranks:
        counted = (((rank - start[row]) >> shift[row])[None] < candidate) & (key == threshold[row])[None]
    else:
        counted = key[None] >= start[row] + (candidate << shift[row])
    counted = (counted & inside[None]).astype(jnp.int32)
    refs[-1][row, block] = jnp.sum(counted, axis=1)


def _mark_kernel(threshold, limit, keys, *refs, ranked):
    """Refs: [R] twice; [R, S]; ranks likewise, if any; int8 [R, S]."""
    row = pl.program_id(0)
    key, rank, _ = _part(keys, refs, ranked)
    kept = (key > threshold[row]) | ((key == threshold[row]) & (rank < limit[row]))
    store_last(refs[-1], (row,), _places(), kept.astype(jnp.int8))


def _part(keys, refs, ranked: bool) -> tuple[Array, Array, Array]:
    """Keys and ranks of a program's block, and which of them there are."""
    at, last = _places(), keys.shape[1] - 1
    index = pl.program_id(0), jnp.minimum(at, last)
    return plt.load(keys.at[index]), plt.load(refs[0].at[index]) if ranked else at, at <= last


def _places() -> Array:
    return pl.program_id(1) * _BLOCK + jnp.arange(_BLOCK)
