"""New tokens on top of a compressed cache: a question, a turn of a chat, or the one token of a decoding step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvec_jax.attention import cache_attention
from kvec_jax.cache import CompressedKV
from kvec_jax.checks import (
    check_cache,
    check_lengths,
    check_model,
    check_same_mesh,
    check_token_array,
    check_token_ids,
)
from kvec_jax.implementations import Implementations, resolve
from kvec_jax.models.transformer import Rotation, Transformer, layer_inputs, layer_reach
from kvec_jax.placement import place_rows
from kvec_jax.spread import on_mesh
from kvec_jax.typing import Array, Implementation


def extend(
    model: Transformer,
    cache: CompressedKV,
    tokens: Array,
    lengths: Array | None = None,
    *,
    all_logits: bool = False,
    implementation: Implementation | Implementations = None,
) -> tuple[Array, CompressedKV]:
    """Runs the model over new tokens, which see what the cache kept, all tokens added before, and one another causally.

    Args:
        model: The decoder that made the cache.
        cache: Stays valid: the result is a new cache, with a copy of the tail.
        tokens: int32 [B, Q], right-padded.
        lengths: int32 [B], real tokens of each row, 0 to Q; ``None`` means that all are. A row without any
            stays as it is.
        all_logits: Whether to return the logits of all new tokens rather than of the last.
        implementation: See ``prefill``.

    Returns:
        Logits float32 [B, V] of each row's last new token (or [B, Q, V]), and the cache with the tokens in its tail.

    Raises:
        ValueError: For arguments that don't fit together, a tail without room, or positions beyond the model's context.

    Example:
        >>> import kvec_jax as kv
        >>> from kvec_jax.testing import tiny_model
        >>> model = tiny_model()
        >>> tokens = jnp.arange(60)[None] % 256
        >>> _, cache = kv.prefill(model, tokens, jnp.array([60]), kv.StreamingLLM(16), reserve=8)
        >>> logits, cache = kv.extend(model, cache, jnp.array([[5, 6, 7]]))
        >>> int(cache.next_position[0])
        63
    """
    tokens, lengths = _check(model, cache, tokens, lengths)
    tokens, lengths = place_rows(model.mesh, tokens=tokens, lengths=lengths)
    return _extend(model, cache, tokens, lengths, all_logits, resolve(implementation, model))


@functools.partial(jax.jit, static_argnames=("all_logits", "how"))
@on_mesh
def _extend(model, cache, tokens, lengths, all_logits, how):
    return run_extend(model, cache, tokens, lengths, all_logits, how)


def run_extend(
    model: Transformer,
    cache: CompressedKV,
    tokens: Array,
    lengths: Array,
    all_logits: bool = False,
    how: Implementations = Implementations(),
) -> tuple[Array, CompressedKV]:
    """``extend`` without checks, to be called under ``jit``."""
    config = model.config
    Q = tokens.shape[1]
    rotation = Rotation(config, cache.rope_position[:, None] + jnp.arange(Q))

    real = jnp.arange(Q) < lengths[:, None]

    def run_layer(carry, inputs):
        hidden, beyond = carry
        (layer, is_local, block), recent = inputs
        queries, keys, values = block.project(hidden)
        queries, keys = (rotation(x, is_local, layer) for x in (queries, keys))
        reach = layer_reach(config, is_local, config.max_position_embeddings)
        more = None
        if beyond is not None:
            more, beyond = beyond.attend(queries, layer, real, config.scale)
        attended = cache_attention(
            queries,
            keys,
            values,
            cache,
            layer,
            scale=config.scale,
            reach=reach,
            more=more,
            implementation=how.ragged_attention,
            interpret=bool(how.interpret),
        )
        recent = None if recent is None else newest_queries(recent, queries, lengths)
        return (block.finish(hidden, attended), beyond), (keys, values, recent)

    start = model.embed(tokens), cache.beyond
    (hidden, beyond), (keys, values, recent) = lax.scan(run_layer, start, (layer_inputs(model), cache.recent))
    if not all_logits:
        last = jnp.maximum(lengths - 1, 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return model.unembed(hidden), dataclasses.replace(
        cache,
        tail_keys=_append(cache.tail_keys, keys, cache.tail_length),
        tail_values=_append(cache.tail_values, values, cache.tail_length),
        tail_length=cache.tail_length + lengths,
        next_position=cache.next_position + lengths,
        recent=recent,
        beyond=beyond,
    )


def newest_queries(recent: Array, queries: Array, lengths: Array) -> Array:
    """The newest queries of one layer, [B, N, W, D], once ``lengths`` [B] of ``queries`` [B, N, Q, D] have come."""
    at = lengths[:, None] + jnp.arange(recent.shape[2])
    return jnp.take_along_axis(jnp.concatenate([recent, queries], axis=2), at[:, None, :, None], axis=2)


def _append(tail: Array, rows: Array, at: Array) -> Array:
    """Writes ``rows`` [L, B, K, Q, D] into the tail [L, B, K, R, D], from row ``at`` [B] on.

    Rows beyond the tail's end are dropped; only padding ever lies there.
    """
    if not tail.shape[3]:  # writing nowhere has no gradient in XLA
        return tail
    B, Q = rows.shape[1], rows.shape[3]
    place = at[:, None] + jnp.arange(Q)
    rows = jnp.moveaxis(rows, (1, 3), (0, 1))  # [B, Q, L, K, D], as the indexing below gives
    return tail.at[:, jnp.arange(B)[:, None], :, place].set(rows, mode="drop")


def _check(model: Transformer, cache: CompressedKV, tokens, lengths) -> tuple[Array, Array]:
    check_model(model)
    check_cache(cache)
    check_same_mesh(model, cache)
    tokens = check_token_array(tokens)
    check_token_ids(model.config, tokens)
    B, Q = tokens.shape
    if cache.tail_length.shape[0] != B:
        raise ValueError(f"tokens: expected {cache.tail_length.shape[0]} rows, as the cache has, got {B}")
    lengths = jnp.full((B,), Q, jnp.int32) if lengths is None else check_lengths(lengths, B, 0, Q)
    if not isinstance(cache.tail_length, jax.core.Tracer) and not isinstance(lengths, jax.core.Tracer):
        check_room(model, cache, int(np.max(cache.tail_length + lengths)), int(np.max(cache.rope_position + lengths)))
    return tokens, lengths


def check_room(model: Transformer, cache: CompressedKV, tail: int, position: int) -> None:
    """Raises unless the cache can hold ``tail`` tail rows and the model ``position`` positions."""
    if tail > cache.tail_capacity:
        raise ValueError(
            f"the cache has room for {cache.tail_capacity} tokens after the prompt and would need {tail}: "
            "give prefill a larger reserve, or use cache.reserve(tokens)"
        )
    context = model.config.max_position_embeddings
    if position > context:
        raise ValueError(f"expected at most {context} positions in all (the model's context), got {position}")
