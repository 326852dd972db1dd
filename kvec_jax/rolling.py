"""Caches of fixed size: the policy chooses again, among what it kept and what came since, and the tail is empty again.

What was dropped can't come back, and scores that look at queries see those of the newest tokens only: after each round
a cache is what the policy would keep of what was left. For scores that depend on the entry alone (the norm of its key,
its position) that is the best of all entries seen; for others it is not.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.cache import CompressedKV
from kvec_jax.errors import UnsupportedError
from kvec_jax.implementations import Implementations
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies.base import Observation, Policy
from kvec_jax.rerotation import turn
from kvec_jax.select import indices_of
from kvec_jax.typing import Array


def check_even(policy: Policy, config: ModelConfig, name: str) -> None:
    """Raises an ``UnsupportedError`` unless all heads of all layers keep the same number of entries."""
    even = isinstance(policy, Policy) and policy.scope == "head" and policy.budget.even
    if not even or config.local_layers:
        who = "models with local layers" if even else _name(policy)
        raise UnsupportedError(
            f"{name}: only for policies whose heads all keep the same number of entries, not for {who}"
        )


def check_rolling(policy: Policy, config: ModelConfig, name: str, tokens: int) -> None:
    """Raises unless ``policy`` can choose again each time that ``tokens`` have come; ``name`` is the user's argument.

    Raises:
        UnsupportedError: For policies whose heads keep different numbers of entries, or whose scores need more than the
            keys, the values and the newest queries; and for models with local layers.
        ValueError: For fewer tokens than the policy always keeps.
    """
    if not isinstance(policy, Policy) or not getattr(policy.scorer, "repeatable", False):
        raise UnsupportedError(f"{name}: {_name(policy)} can't choose again among what it kept")
    check_even(policy, config, name)
    if tokens < policy.scorer.window:
        window = policy.scorer.window
        raise ValueError(f"{name}: expected at least {window} (the window of {_name(policy)}), got {tokens}")


def _name(policy) -> str:
    return getattr(policy, "name", repr(policy))


def empty_cache(
    policy: Policy, config: ModelConfig, batch: int, rows: int, tail: int, dtype, rerotate: bool
) -> CompressedKV:
    """A cache of nothing yet, with ``rows`` for each segment and room for ``tail`` tokens."""
    L, K, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    pool, tails = jnp.zeros((batch, L * K * rows, D), dtype), jnp.zeros((L, batch, K, tail, D), dtype)
    nothing = jnp.zeros((batch,), jnp.int32)
    return CompressedKV(
        keys=pool,
        values=pool,
        positions=jnp.zeros(pool.shape[:2], jnp.int32),
        starts=jnp.broadcast_to(rows * jnp.arange(L * K, dtype=jnp.int32).reshape(L, K), (batch, L, K)),
        counts=jnp.zeros((batch, L, K), jnp.int32),
        tail_keys=tails,
        tail_values=tails,
        tail_length=nothing,
        next_position=nothing,
        shift=nothing if rerotate else None,
        recent=jnp.zeros((L, batch, config.num_attention_heads, policy.scorer.window, D), dtype),
        segment_rows=rows,
    )


def as_rolling(cache: CompressedKV, policy: Policy, config: ModelConfig, rows: int, tail: int) -> CompressedKV:
    """A cache that the ``policy`` just made, with ``rows`` for each segment and an empty tail for ``tail`` tokens."""
    B, L, K = cache.counts.shape
    held = cache.segment_rows
    start = empty_cache(policy, config, B, rows, tail, cache.keys.dtype, rerotate=False)

    def wider(pool):
        padding = [(0, 0)] * pool.ndim
        padding.insert(2, (0, rows - held))
        return jnp.pad(pool.reshape(B, L * K, held, *pool.shape[2:]), padding).reshape(B, L * K * rows, *pool.shape[2:])

    pool = {name: wider(getattr(cache, name)) for name in ("keys", "values", "positions")}
    same = dict(counts=cache.counts, next_position=cache.next_position, shift=cache.shift)
    return dataclasses.replace(start, **pool, **same)


def make_room(
    model: Transformer, policy: Policy, prepared: Any, cache: CompressedKV, lengths: Array, how: Implementations
) -> CompressedKV:
    """The cache with room for ``lengths`` [B] more tokens: rows whose tail is too full for them choose again."""
    full = cache.tail_length + lengths > cache.tail_capacity
    return lax.cond(
        model.config.part.any_row(full),
        lambda cache: choose_again(model, policy, prepared, cache, full, cache.next_position, how),
        lambda cache: cache,
        cache,
    )


def choose_again(
    model: Transformer,
    policy: Policy,
    prepared: Any,
    cache: CompressedKV,
    which: Array,
    totals: Array,
    how: Implementations,
) -> CompressedKV:
    """Compresses pool and tail into the pool; where keys are turned to new positions (``cache.shift``), they are again.

    Args:
        model: The decoder.
        policy: One that ``check_rolling`` lets pass.
        prepared: What its scorer's ``prepare`` made.
        cache: Of equal segments.
        which: bool [B], rows of the batch to do that for; the others stay as they are.
        totals: int32 [B], lengths that the policy's budget is of.
        how: Static. How operations are carried out.
    """
    config = model.config
    B, L, K = cache.counts.shape
    S = cache.segment_rows
    budgets = policy.budget.per_layer(totals, L)
    held = cache.counts[:, :, 0].T  # [L, B], the same for all heads
    tail_positions = (cache.next_position - cache.tail_length)[:, None] + jnp.arange(cache.tail_capacity)

    def by_layer(pool):
        return jnp.moveaxis(pool.reshape(B, L, K, S, *pool.shape[2:]), 1, 0)

    def as_pool(layers):
        return jnp.moveaxis(layers, 0, 1).reshape(B, L * K * S, *layers.shape[4:])

    def choose(_, inputs):
        layer, block, prepared, pool, tails, recent, budget, held = inputs
        tails = (*tails, jnp.broadcast_to(tail_positions[:, None], (B, K, cache.tail_capacity)))
        keys, values, positions = (_append(p, t, held) for p, t in zip(pool, tails, strict=True))
        lengths = held + cache.tail_length
        seen = Observation(
            queries=_at_end(recent, lengths, keys.shape[2]),
            raw_queries=None,
            keys=keys,
            values=values,
            lengths=lengths,
            output_matrix=block.o_proj[...],
            prepared=prepared,
            layer=layer,
            num_layers=L,
            config=config,
            implementations=how,
        )
        scores, _ = policy.scorer.score(seen, None)
        places = jnp.broadcast_to(jnp.minimum(budget, lengths)[:, None], (B, K))
        kept = seen.best(policy.order(scores, lengths), places)
        index = jnp.minimum(indices_of(kept, S), keys.shape[2] - 1)
        chosen = [_take(x, index) for x in (keys, values, positions)]
        if cache.shift is not None:  # an entry stood at the position of its place
            chosen[0] = turn(config, chosen[0], jnp.arange(S) - index, layer)
        pool = [jnp.where(_like(which, new), new, old) for new, old in zip(chosen, pool, strict=True)]
        return None, (*pool, jnp.where(which[:, None], jnp.sum(kept, axis=-1, dtype=jnp.int32), held[:, None]))

    pool = tuple(by_layer(x) for x in (cache.keys, cache.values, cache.positions))
    tails = cache.tail_keys, cache.tail_values
    inputs = jnp.arange(L), model.layers, prepared, pool, tails, cache.recent, budgets, held
    _, (keys, values, positions, counts) = lax.scan(choose, None, inputs)
    counts = jnp.moveaxis(counts, 0, 1)
    shift = None if cache.shift is None else jnp.where(which, cache.next_position - counts[:, 0, 0], cache.shift)
    return dataclasses.replace(
        cache,
        keys=as_pool(keys),
        values=as_pool(values),
        positions=as_pool(positions),
        counts=counts,
        shift=shift,
        tail_length=jnp.where(which, 0, cache.tail_length),
    )


def _append(pool: Array, tail: Array, held: Array) -> Array:
    """Rows [B, K, S + R, ...]: the first ``held`` [B] of ``pool`` [B, K, S, ...], then those of ``tail``."""
    room = [(0, 0)] * pool.ndim
    room[2] = (0, tail.shape[2])

    def put(pool, tail, held):
        return lax.dynamic_update_slice_in_dim(pool, tail, held, axis=1)

    return jax.vmap(put)(jnp.pad(pool, room), tail, held)


def _at_end(recent: Array, lengths: Array, total: int) -> Array:
    """Queries [B, N, total, D] that hold ``recent`` [B, N, W, D] in the last places before ``lengths`` [B]."""
    B, N, W, D = recent.shape

    def put(recent, length):
        return lax.dynamic_update_slice_in_dim(jnp.zeros((N, total, D), recent.dtype), recent, length - W, axis=1)

    return jax.vmap(put)(recent, lengths)


def _take(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 3)), axis=2)


def _like(which: Array, x: Array) -> Array:
    return which.reshape(-1, *[1] * (x.ndim - 1))
