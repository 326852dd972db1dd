"""Attention of a prompt's last queries over its keys, reduced key by key, on a TPU.

One program sees a block of S keys of all K heads; the grid goes through the blocks of a row. Per head: one product
[G W, D] x [D, S] on the matrix unit, weights by the log-sum-exp that is known already, and whatever ``reduce`` makes of
them, all in VMEM. Since all heads are there together, the largest weight over the heads needs no second pass.

For each of B rows, bytes that must move: K T D of keys once, and what ``reduce`` gives, [.., T] in float32. Operations
that must run: 2 N W T D in the product. ``logsumexp`` reads the keys once more where nobody knows it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvec_jax.online_softmax import LOWEST
from kvec_jax.typing import Array

# Bytes of a block of keys, and of the weights of one head's queries over it.
_KEY_BYTES = 1 << 20
_WEIGHT_BYTES = 1 << 19
_LANES, _SUBLANES = 128, 8
# Queries and log-sum-exps of a row stay for all its blocks; hundreds of queries need more than the usual 16 MiB.
_COMPILER_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=48 << 20)


def refusal(queries: Array, keys: Array) -> str | None:
    """Why these arrays can't be had, or ``None``."""
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16 queries and keys of one type, got {queries.dtype} and {keys.dtype}"
    rows = _rounded(queries.shape[2] * queries.shape[3], _SUBLANES)
    if rows * _LANES * 4 > 8 * _WEIGHT_BYTES:
        return f"expected at most {8 * _WEIGHT_BYTES // (4 * _LANES)} queries for each key-value head, got {rows}"
    return None


def statistics(
    queries: Array,
    positions: Array,
    keys: Array,
    logsumexp: Array,
    reduce: Callable,
    rivals: Callable | None,
    scale: float,
    interpret: bool,
):
    """See ``kvec_jax.scores.window_scores``.

    Args:
        queries: [B, K, G, W, D].
        positions: int32 [B, W].
        keys: [B, K, T, D].
        logsumexp: float32 [B, K, G, W].
        reduce: From weights float32 [G, W, S] and bool [W, 1] to a pytree of [..., S].
        rivals: From weights float32 [G, W, S] to [W, S], or ``None``.
        scale: Factor on the logits.
        interpret: Whether to interpret the kernel.

    Returns:
        Pytree of [B, K, ..., T], and float32 [B, T] or ``None``.
    """
    queries, positions, logsumexp = _pad_window(queries, positions, logsumexp)
    B, K, G, W, D = queries.shape
    T = keys.shape[2]
    S = _block(K, G * W, T, D, keys.dtype.itemsize)
    weights = jax.ShapeDtypeStruct((G, W, S), jnp.float32)
    shapes, tree = jax.tree.flatten(jax.eval_shape(reduce, weights, jax.ShapeDtypeStruct((W, 1), bool)))
    out_shape = [jax.ShapeDtypeStruct((B, K, *x.shape[:-1], T), x.dtype) for x in shapes]
    out_specs = [_key_spec((K, *x.shape[:-1], S)) for x in shapes]
    if rivals is not None:
        out_shape.append(jax.ShapeDtypeStruct((B, 1, T), jnp.float32))
        out_specs.append(_key_spec((1, S)))
    outputs = pl.pallas_call(
        functools.partial(_statistics_kernel, reduce=reduce, rivals=rivals, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, pl.cdiv(T, S)),
            in_specs=[*_query_specs(K, G, W, D), _visible_keys(K, S, D), _row_spec((K, G, W, 1))],
            out_specs=out_specs,
        ),
        out_shape=out_shape,
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
        name="window_statistics",
    )(jnp.max(positions, axis=1), positions[..., None], queries, keys, logsumexp[..., None])
    peak = None if rivals is None else outputs[-1][:, 0]
    return jax.tree.unflatten(tree, outputs[: len(shapes)]), peak


def _statistics_kernel(last, positions, queries, keys, logsumexp, *outputs, reduce, rivals, scale):
    """Refs: [B]; [1, W, 1]; [1, K, G, W, D]; [1, K, S, D]; [1, K, G, W, 1]; one for each statistic [1, K, ..., S]."""
    G, W = queries.shape[2:4]
    K, S = keys.shape[1:3]
    at = pl.program_id(1) * S + lax.broadcasted_iota(jnp.int32, (W, S), 1)
    looks = positions[0] >= 0
    visible = at <= positions[0]
    peak = None
    for k in range(K):
        logits = _logits(queries, keys, k, scale).reshape(G, W, S)
        weights = jnp.where(visible, jnp.exp(logits - logsumexp[0, k]), 0.0)
        for ref, value in zip(outputs, jax.tree.leaves(reduce(weights, looks))):
            ref[0, k] = value
        if rivals is not None:
            mine = rivals(weights)
            peak = mine if peak is None else jnp.maximum(peak, mine)
    if rivals is not None:
        outputs[-1][0] = jnp.sum(peak, axis=0, keepdims=True)


def logsumexp(queries: Array, positions: Array, keys: Array, scale: float, interpret: bool) -> Array:
    """Log-sum-exp of the logits of every query, float32 [B, K, G, W]; arguments as for ``statistics``."""
    W = queries.shape[3]
    queries, positions, _ = _pad_window(queries, positions, None)
    B, K, G, padded, D = queries.shape
    T = keys.shape[2]
    S = _block(K, G * padded, T, D, keys.dtype.itemsize)
    out = pl.pallas_call(
        functools.partial(_logsumexp_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, pl.cdiv(T, S)),
            in_specs=[*_query_specs(K, G, padded, D), _visible_keys(K, S, D)],
            out_specs=_row_spec((K, G, padded, 1)),
            scratch_shapes=[pltpu.VMEM((2, K, G * padded, 1), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, K, G, padded, 1), jnp.float32),
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
        name="window_logsumexp",
    )(jnp.max(positions, axis=1), positions[..., None], queries, keys)
    return out[..., padded - W :, 0]


def _logsumexp_kernel(last, positions, queries, keys, out, state, *, scale):
    """Refs as above; ``state`` [2, K, G W, 1]: running maximum, and sum of exponentials."""
    G, W = queries.shape[2:4]
    K, S = keys.shape[1:3]
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        state[0] = jnp.full_like(state[0], LOWEST)
        state[1] = jnp.zeros_like(state[1])

    @pl.when(j * S <= last[pl.program_id(0)])
    def _():
        at = j * S + lax.broadcasted_iota(jnp.int32, (W, S), 1)
        visible = at <= positions[0]
        for k in range(K):
            logits = jnp.where(visible, _logits(queries, keys, k, scale).reshape(G, W, S), -jnp.inf)
            logits = logits.reshape(G * W, S)
            maximum = jnp.maximum(state[0, k], jnp.max(logits, axis=1, keepdims=True))
            added = jnp.sum(jnp.exp(logits - maximum), axis=1, keepdims=True)
            state[1, k] = state[1, k] * jnp.exp(state[0, k] - maximum) + added
            state[0, k] = maximum

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        total = jnp.where(state[1] == 0, 1.0, state[1])
        out[0] = (state[0] + jnp.log(total)).reshape(out.shape[1:])


def _logits(queries, keys, k: int, scale: float) -> Array:
    """Logits [G W, S] of head ``k``; float32 operands are multiplied as such, not rounded to bfloat16."""
    G, W, D = queries.shape[2:]
    exact = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    return scale * lax.dot_general(
        queries[0, k].reshape(G * W, D),
        keys[0, k],
        (((1,), (1,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def _pad_window(queries: Array, positions: Array, logsumexp: Array | None):
    """Fills the window up to whole sublanes, in front, with queries that look at nothing."""
    missing = -queries.shape[3] % (_SUBLANES * 4 // queries.dtype.itemsize)
    front = (missing, 0)
    queries = jnp.pad(queries, [(0, 0)] * 3 + [front, (0, 0)])
    positions = jnp.pad(positions, [(0, 0), front], constant_values=-1)
    logsumexp = None if logsumexp is None else jnp.pad(logsumexp, [(0, 0)] * 3 + [front])
    return queries, positions, logsumexp


def _block(K: int, rows: int, T: int, D: int, itemsize: int) -> int:
    """S: keys of a block; all of them, or whole lanes."""
    most = min(_KEY_BYTES // (K * _rounded(D, _LANES) * itemsize), _WEIGHT_BYTES // (rows * 4))
    most = max(most // _LANES, 1) * _LANES
    return min(T, most)


def _query_specs(K: int, G: int, W: int, D: int) -> list[pl.BlockSpec]:
    return [_row_spec((W, 1)), _row_spec((K, G, W, D))]


def _row_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
    """All that belongs to one row of the batch."""
    return pl.BlockSpec((1, *shape), lambda b, j, last: (b, *([0] * len(shape))))


def _key_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
    """What belongs to a row's block of keys, the last axis."""
    return pl.BlockSpec((1, *shape), lambda b, j, last: (b, *([0] * (len(shape) - 1)), j))


def _visible_keys(K: int, S: int, D: int) -> pl.BlockSpec:
    """A block of keys; for those behind a row's last query the last one stays, so that nothing is copied."""
    return pl.BlockSpec((1, K, S, D), lambda b, j, last: (b, 0, jnp.minimum(j, jnp.maximum(last[b], 0) // S), 0))


def _rounded(value: int, step: int) -> int:
    return -(-value // step) * step
