"""Reading a prompt in chunks, compressing in between: no more than the pool and one chunk is ever held."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvec_jax.cache import CompressedKV
from kvec_jax.extend import run_extend
from kvec_jax.implementations import Implementations
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies.base import Policy
from kvec_jax.rolling import choose_again, empty_cache
from kvec_jax.typing import Array


def read_in_chunks(
    model: Transformer,
    prepared: Any,
    tokens: Array,
    lengths: Array,
    policy: Policy,
    reserve: int,
    chunk: int,
    rerotate: bool,
    how: Implementations,
) -> tuple[Array, CompressedKV]:
    """``run_prefill`` in chunks of ``chunk`` tokens.

    A row's last chunk is a whole one and its first takes what is left over, so that the queries that choose are there.

    Args:
        model: The decoder.
        prepared: What ``prepare`` gave.
        tokens: int32 [B, T].
        lengths: int32 [B].
        policy: One that ``check_rolling`` lets pass.
        reserve: Room in the tail.
        chunk: Tokens of a chunk; static.
        rerotate: Whether kept entries are turned to the positions 0, 1, 2, ... after each.
        how: Static. How operations are carried out.

    Returns:
        Logits float32 [B, V] of each row's last token, and the cache.
    """
    config = model.config
    B, T = tokens.shape
    chunk = min(chunk, T)
    chunks = -(-T // chunk)
    rows = policy.budget.most(T, config.num_hidden_layers)
    everyone = jnp.ones((B,), bool)

    def read(state, number):
        _, cache = state
        end = jnp.maximum(lengths - (chunks - 1 - number) * chunk, 0)
        start = jnp.maximum(end - chunk, 0)
        at = jnp.minimum(start[:, None] + jnp.arange(chunk), T - 1)
        part = jnp.take_along_axis(tokens, at, axis=1)
        logits, cache = run_extend(model, cache, part, end - start, how=how)
        return (logits, choose_again(model, policy, prepared, cache, everyone, lengths, how)), None

    nothing = empty_cache(policy, config, B, rows, chunk, model.dtype, rerotate)
    start = jnp.zeros((B, config.vocab_size)), nothing
    (logits, cache), _ = lax.scan(read, start, jnp.arange(chunks))
    tail = jnp.zeros((*cache.tail_keys.shape[:3], reserve, config.head_dim), model.dtype)
    return logits, dataclasses.replace(cache, tail_keys=tail, tail_values=tail, recent=None)
