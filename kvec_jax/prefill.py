"""Reading a prompt: one scan over the layers, in which each layer's cache is compressed as soon as it exists."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_count
from kvec_jax.cache import CompressedKV
from kvec_jax.checks import check_model, check_policy, check_tokens
from kvec_jax.chunked import read_in_chunks
from kvec_jax.forms import Form
from kvec_jax.implementations import Implementations, resolve
from kvec_jax.keeping import Keeper, keeper
from kvec_jax.limits import Limits, check_limits, check_positions
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Rotation, Transformer, layer_inputs, layer_reach
from kvec_jax.placement import place_rows
from kvec_jax.policies.base import Observation, Policy
from kvec_jax.policies.prepared import prepare
from kvec_jax.pool import Pool
from kvec_jax.prompt_attention import attend_prompt
from kvec_jax.quantised import quantise
from kvec_jax.rerotation import move_to_front
from kvec_jax.spread import on_mesh
from kvec_jax.typing import Array, Implementation


def prefill(
    model: Transformer,
    tokens: Array,
    lengths: Array,
    policy: Policy | Form,
    *,
    reserve: int = 0,
    all_logits: bool = False,
    chunk: int | None = None,
    cache_dtype: str | None = None,
    rerotate: bool = False,
    implementation: Implementation | Implementations = None,
) -> tuple[Array, CompressedKV]:
    """Runs the model over prompts and keeps the part of the cache that the policy chooses.

    The attention of the prompt itself is exact; only what later tokens see is compressed. The rows of a batch are
    independent of each other and of their padding. Of local (sliding window) layers the window is kept, which is not
    charged to the budget.

    Args:
        model: The decoder.
        tokens: int32 [B, T], right-padded.
        lengths: int32 [B], real tokens of each row, 1 to T.
        policy: What to keep.
        reserve: Room in the tail, in tokens, for ``extend`` and ``decode``.
        all_logits: Whether to return the logits of all tokens rather than of the last.
        chunk: Tokens to read at a time, for prompts whose keys don't fit the memory: the cache is compressed after each
            chunk, and the tokens of later ones see only what was kept. Only for policies whose heads all keep the same
            number of entries, chosen by keys or by the newest queries. ``None`` reads all at once, which is exact.
        cache_dtype: ``"int8"`` or ``"int4"``: kept rows are stored in so many bits, see ``quantise``; ``None`` means
            the model's dtype.
        rerotate: Whether the kept entries of each head get the positions 0, 1, 2, ..., their keys turned to them, so
            that with ``chunk`` prompts may be longer than the model's context: the budget and one chunk must fit. For
            policies whose heads all keep the same number of entries. By default keys stay at the positions where they
            were, and new tokens go on after the prompt.
        implementation: How operations are carried out: a name for all of them, or ``Implementations``; ``None`` takes
            the platform's kernels where they support the case.

    Returns:
        Logits float32 [B, V] of each row's last token (or [B, T, V]), and the cache.

    Raises:
        TypeError, ValueError: For tokens, lengths or a policy that can't be.
        UnsupportedError: If an implementation that was asked for by name can't do this.

    Example:
        >>> import kvec_jax as kv
        >>> from kvec_jax.testing import tiny_model
        >>> tokens = jnp.arange(60)[None] % 256
        >>> logits, cache = kv.prefill(tiny_model(), tokens, jnp.array([60]), kv.SnapKV(32, window=8))
        >>> cache.kept_positions(0)[3][1].size
        32
    """
    check_model(model)
    check_policy(policy, model.mesh)
    check_count("reserve", reserve, 0)
    tokens, lengths = check_tokens(model.config, tokens, lengths)
    limits = check_limits(policy, model.config, chunk=chunk, cache_dtype=cache_dtype, rerotate=rerotate)
    check_positions("tokens", limits, policy, model.config, tokens.shape[1])
    if all_logits and chunk is not None:
        raise ValueError("all_logits: not with chunk, which holds one chunk at a time")
    how = resolve(implementation, model)
    tokens, lengths = place_rows(model.mesh, tokens=tokens, lengths=lengths)
    return _prefill(model, prepare(policy, model), tokens, lengths, policy, reserve, all_logits, how, limits)


@functools.partial(jax.jit, static_argnames=("policy", "reserve", "all_logits", "how", "limits"))
@on_mesh
def _prefill(model, prepared, tokens, lengths, policy, reserve, all_logits, how, limits):
    return run_prefill(model, prepared, tokens, lengths, policy, reserve, all_logits, how, limits)


def run_prefill(
    model: Transformer,
    prepared: Any,
    tokens: Array,
    lengths: Array,
    policy: Policy | Form,
    reserve: int,
    all_logits: bool = False,
    how: Implementations = Implementations(),
    limits: Limits = Limits(),
) -> tuple[Array, CompressedKV]:
    """``prefill`` without checks, to be called under ``jit``; ``prepared`` is what ``prepare`` gave."""
    if isinstance(policy, Form):
        return policy.read(model, prepared, tokens, lengths, reserve, all_logits, how)
    if limits.chunk is None:
        logits, cache = _read_at_once(model, prepared, tokens, lengths, policy, reserve, all_logits, how)
        cache = move_to_front(cache, model.config) if limits.rerotate else cache
    else:
        settings = limits.chunk, limits.rerotate, how
        logits, cache = read_in_chunks(model, prepared, tokens, lengths, policy, reserve, *settings)
    return logits, cache if limits.cache_dtype is None else quantise(cache, limits.cache_dtype)


def _read_at_once(
    model: Transformer,
    prepared: Any,
    tokens: Array,
    lengths: Array,
    policy: Policy,
    reserve: int,
    all_logits: bool,
    how: Implementations,
) -> tuple[Array, CompressedKV]:
    keep = keeper(policy, model.config, lengths, tokens.shape[1])
    memory = policy.scorer.init(model.config, *tokens.shape)
    hidden, pool = read_layers(model, prepared, tokens, lengths, memory, keep, how)
    if not all_logits:
        hidden = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return model.unembed(hidden), as_cache(keep.finish(pool), model.config, lengths, reserve)


def read_layers(
    model: Transformer,
    prepared: Any,
    tokens: Array,
    lengths: Array,
    memory: Any,
    keep: Keeper,
    how: Implementations = Implementations(),
) -> tuple[Array, Any]:
    """The scan over the layers: hidden states [B, T, M] of the last one, and what ``keep`` carries at the end.

    ``memory`` is what the policy's scorer carries into the first layer.
    """
    config = model.config
    B, T = tokens.shape
    rotation = Rotation(config, jnp.broadcast_to(jnp.arange(T), (B, T)))

    def read_layer(carry, inputs):
        hidden, pool, memory = carry
        (layer, is_local, block), prepared = inputs
        raw_queries, raw_keys, values = block.project(hidden)
        queries, keys = (rotation(x, is_local, layer) for x in (raw_queries, raw_keys))
        reach = layer_reach(config, is_local, T)
        attended, logsumexp = attend_prompt(
            queries,
            keys,
            values,
            lengths,
            scale=config.scale,
            reach=reach,
            window=config.sliding_window,
            implementation=how.prompt_attention,
            interpret=bool(how.interpret),
        )
        hidden = block.finish(hidden, attended)
        seen = Observation(
            queries=queries,
            raw_queries=raw_queries,
            keys=keys,
            values=values,
            lengths=lengths,
            output_matrix=block.o_proj[...],
            prepared=prepared,
            layer=keep.plan.ranks[layer],
            logsumexp=logsumexp,
            num_layers=keep.plan.num_layers,
            config=config,
            implementations=how,
        )
        pool, memory = keep.add(pool, layer, is_local, seen, memory)
        return (hidden, pool, memory), None

    start = model.embed(tokens), keep.empty(model.dtype), memory
    (hidden, pool, _), _ = lax.scan(read_layer, start, (layer_inputs(model), prepared))
    return hidden, pool


def as_cache(pool: Pool, config: ModelConfig, lengths: Array, reserve: int) -> CompressedKV:
    """The cache of a finished pool, with an empty tail."""
    B = lengths.shape[0]
    tail = jnp.zeros(
        (config.num_hidden_layers, B, config.num_key_value_heads, reserve, config.head_dim), pool.keys.dtype
    )
    return CompressedKV(
        keys=pool.keys,
        values=pool.values,
        positions=pool.positions,
        starts=pool.starts,
        counts=pool.counts,
        tail_keys=tail,
        tail_values=tail,
        tail_length=jnp.zeros((B,), jnp.int32),
        next_position=lengths,
        segment_rows=pool.segment_rows,
    )
