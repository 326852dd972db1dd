"""The k largest of a row, exactly, on a TPU.

There is no sort on a TPU's vector unit, but there are comparisons and sums: the k-th largest key is found bit by bit,
32 counts of how many keys are at least a candidate; then, bit by bit too, the rank below which so many of the keys
equal to it lie as still fit. One program holds one whole row in VMEM, as lines of 128, so that every count uses all
lanes.

For each row of S keys, bytes that must move: 4 S in, 4 S for ranks if they are not the places themselves, 4 S out (a
mask of words: a program's block of bytes would not fill a tile). Operations that must run: one comparison and one
addition for each key and bit, 2 S (32 + log2 S).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvec_jax.typing import Array

LOWEST = -(2**31)
_LANES = 128
# Lines of a row that are counted at a time.
_LINES = 64
# Bytes of VMEM that the blocks of a row may take: two of each array, of the 64 MiB that the smallest has.
_VMEM_BYTES = 48 << 20


def refusal(keys: Array, rank: Array | None) -> str | None:
    """Why these arrays can't be had, or ``None``."""
    most = _VMEM_BYTES // (4 * 2 * (2 if rank is None else 3))
    if keys.shape[-1] > most:
        return f"expected rows of at most {most} keys, got {keys.shape[-1]}"
    return None if keys.size else "expected rows with keys, got none"


def top_k_mask(keys: Array, k: Array, rank: Array | None, interpret: bool) -> Array:
    """See ``kvec_jax.select.top_k_mask``.

    Args:
        keys: int32 [R, S].
        k: int32 [R], from 0 to S.
        rank: int32 [R, S], or ``None``.
        interpret: Whether to interpret the kernel.

    Returns:
        bool [R, S].
    """
    R, S = keys.shape
    lines = pl.cdiv(S, _LINES * _LANES) * _LINES
    bits = (lines * _LANES).bit_length() if rank is None else 31
    row = pl.BlockSpec((1, lines, _LANES), lambda r, k: (r, 0, 0))
    operands = [_in_lines(keys, lines, LOWEST)] + ([] if rank is None else [_in_lines(rank, lines, 2**31 - 1)])
    mask = pl.pallas_call(
        functools.partial(_kernel, bits=bits),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(R,), in_specs=[row] * len(operands), out_specs=row
        ),
        out_shape=jax.ShapeDtypeStruct((R, lines, _LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM_BYTES + (8 << 20)
        ),
        interpret=interpret,
        name="select_top_k",
    )(k, *operands)
    return mask.reshape(R, -1)[:, :S] != 0


def _kernel(k, keys, *refs, bits):
    """Refs: [R]; [1, lines, 128]; ranks likewise, if any; the mask likewise."""
    *rank, out = refs
    lines = keys.shape[1]
    wanted = k[pl.program_id(0)]

    def part(i):
        """Keys and ranks of some lines."""
        rows = pl.ds(i * _LINES, _LINES)
        if rank:
            return keys[0, rows], rank[0][0, rows]
        line = i * _LINES + lax.broadcasted_iota(jnp.int32, (_LINES, _LANES), 0)
        return keys[0, rows], line * _LANES + lax.broadcasted_iota(jnp.int32, (_LINES, _LANES), 1)

    def count(marks):
        """How many keys are marked: lane by lane first, across the lanes once."""

        def add(i, total):
            return total + jnp.where(marks(*part(i)), jnp.int32(1), jnp.int32(0))

        return jnp.sum(lax.fori_loop(0, lines // _LINES, add, jnp.zeros((_LINES, _LANES), jnp.int32)))

    def threshold_bit(i, threshold):
        # Bits from the highest down, of numbers that are counted from the lowest integer.
        candidate = threshold ^ (jnp.int32(1) << (jnp.int32(31) - i))
        return jnp.where(count(lambda key, _: key >= candidate) >= wanted, candidate, threshold)

    threshold = lax.fori_loop(0, 32, threshold_bit, jnp.int32(LOWEST))
    room = wanted - count(lambda key, _: key > threshold)

    def limit_bit(i, limit):
        candidate = limit | (jnp.int32(1) << (jnp.int32(bits - 1) - i))
        fits = count(lambda key, rank: (key == threshold) & (rank < candidate)) <= room
        return jnp.where(fits, candidate, limit)

    limit = lax.fori_loop(0, bits, limit_bit, jnp.int32(0))

    def mark(i, _):
        key, rank = part(i)
        kept = (key > threshold) | ((key == threshold) & (rank < limit))
        out[0, pl.ds(i * _LINES, _LINES)] = jnp.where(kept, jnp.int32(1), jnp.int32(0))

    lax.fori_loop(0, lines // _LINES, mark, None)


def _in_lines(x: Array, lines: int, filler: int) -> Array:
    R, S = x.shape
    return jnp.pad(x, [(0, 0), (0, lines * _LANES - S)], constant_values=filler).reshape(R, lines, _LANES)
