"""Generation: the decoding loop, and prompt to tokens in one ``jit``."""

import functools
import numbers
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.arguments import check_count
from kvec_jax.cache import CompressedKV
from kvec_jax.checks import check_cache, check_model, check_policy, check_same_mesh, check_tokens
from kvec_jax.decoding import DecodeState, advance, begin
from kvec_jax.extend import check_room
from kvec_jax.implementations import Implementations, resolve
from kvec_jax.limits import Limits, check_limits, check_positions
from kvec_jax.models.transformer import Transformer
from kvec_jax.placement import place_rows
from kvec_jax.policies.base import Policy
from kvec_jax.policies.prepared import prepare
from kvec_jax.prefill import run_prefill
from kvec_jax.rolling import as_rolling, make_room
from kvec_jax.sampling import Greedy, Sample, Sampler
from kvec_jax.spread import on_mesh
from kvec_jax.typing import Array, Implementation


def generate(
    model: Transformer,
    tokens: Array,
    lengths: Array,
    policy: Policy,
    sampler: Sampler = Greedy(),  # noqa: B008 - immutable
    key: Array | None = None,
    max_new_tokens: int = 64,
    *,
    eos_token_ids: tuple[int, ...] | None = None,
    chunk: int | None = None,
    tail: int | None = None,
    cache_dtype: str | None = None,
    rerotate: bool = False,
    implementation: Implementation | Implementations = None,
) -> Array:
    """Reads prompts, compresses their cache and generates from what is left, all in one compiled program.

    It stops as soon as every row has met an end token. A row's tokens do not depend on the other rows.

    Args:
        model: The decoder.
        tokens: int32 [B, T], right-padded.
        lengths: int32 [B], real tokens of each row, 1 to T.
        policy: What to keep of the prompts' cache. The generated tokens are all kept, unless there is a ``tail``.
        sampler: ``Greedy()`` or ``Sample(...)``.
        key: Random key for ``Sample``: one, or one per row [B].
        max_new_tokens: Most tokens to generate; static.
        eos_token_ids: Tokens that end a row; ``None`` means the model's own. A row is filled up with its end token.
        chunk: See ``prefill``.
        tail: Generated tokens that are held beside what was kept: when there are so many, the policy chooses again
            among all of it, so that memory is the same for texts of any length. For policies as for ``chunk``, with a
            budget in tokens. ``None`` keeps all generated tokens.
        cache_dtype: See ``prefill``.
        rerotate: See ``prefill``; with ``tail``, a text may go on beyond the model's context.
        implementation: See ``prefill``.

    Returns:
        int32 [B, max_new_tokens].

    Raises:
        TypeError, ValueError: For arguments that can't be; it names the argument.
        UnsupportedError: If an implementation that was asked for by name can't do this.

    Example:
        >>> import kvec_jax as kv
        >>> from kvec_jax.testing import tiny_model
        >>> tokens = jnp.arange(60)[None] % 256
        >>> kv.generate(tiny_model(), tokens, jnp.array([60]), kv.SnapKV(32), max_new_tokens=5).shape
        (1, 5)
    """
    check_model(model)
    check_policy(policy, model.mesh)
    check_count("max_new_tokens", max_new_tokens, 1)
    tokens, lengths = check_tokens(model.config, tokens, lengths)
    key = check_key(sampler, key, tokens.shape[0])
    ends = end_tokens(model, eos_token_ids)
    limits = check_limits(policy, model.config, chunk=chunk, tail=tail, cache_dtype=cache_dtype, rerotate=rerotate)
    longest = tokens.shape[1] if isinstance(lengths, jax.core.Tracer) else int(np.max(lengths))
    check_positions("tokens", limits, policy, model.config, longest, max_new_tokens)
    how = resolve(implementation, model)
    prepared = prepare(policy, model)
    tokens, lengths, key = place_rows(model.mesh, tokens=tokens, lengths=lengths, key=key)
    return _generate(model, prepared, tokens, lengths, policy, sampler, key, max_new_tokens, ends, how, limits)


@functools.partial(jax.jit, static_argnames=("policy", "max_new_tokens", "eos_token_ids", "how", "limits"))
@on_mesh
def _generate(model, prepared, tokens, lengths, policy, sampler, key, max_new_tokens, eos_token_ids, how, limits):
    logits, cache = read_prompts(model, prepared, tokens, lengths, policy, max_new_tokens, how, limits)
    state = begin(cache, logits, sampler, key, max_new_tokens, eos_token_ids)
    room = room_maker(model, prepared, policy, how, limits)
    return advance(model, state, sampler, key, max_new_tokens, eos_token_ids, how, room).tokens


def read_prompts(
    model: Transformer,
    prepared: Any,
    tokens: Array,
    lengths: Array,
    policy: Policy,
    max_new_tokens: int,
    how: Implementations,
    limits: Limits,
) -> tuple[Array, CompressedKV]:
    """``run_prefill`` with room for ``max_new_tokens``, or for the tail that ``limits`` allow."""
    reserve = max_new_tokens if limits.tail is None else 0
    logits, cache = run_prefill(model, prepared, tokens, lengths, policy, reserve, how=how, limits=limits)
    if limits.tail is not None:
        cache = as_rolling(cache, policy, model.config, policy.budget.tokens, limits.tail)
    return logits, cache


def room_maker(model: Transformer, prepared: Any, policy: Policy, how: Implementations, limits: Limits):
    """What ``advance`` calls before it adds a token; ``None`` where no tail fills up."""
    if limits.tail is None:
        return None
    return lambda cache, lengths: make_room(model, policy, prepared, cache, lengths, how)


def decode(
    model: Transformer,
    cache: CompressedKV,
    logits: Array,
    sampler: Sampler = Greedy(),  # noqa: B008 - immutable
    key: Array | None = None,
    *,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...] | None = None,
    implementation: Implementation | Implementations = None,
) -> tuple[Array, CompressedKV]:
    """Generates from a cache, in one loop on the device.

    Args:
        model: The decoder that made the cache.
        cache: With room for ``max_new_tokens`` in its tail. Its buffers are donated: it can't be used afterwards.
        logits: float32 [B, V] that ``prefill`` or ``extend`` gave with the cache.
        sampler: ``Greedy()`` or ``Sample(...)``.
        key: Random key for ``Sample``: one, or one per row [B].
        max_new_tokens: Most tokens to generate; static.
        eos_token_ids: Tokens that end a row; ``None`` means the model's own. A row is filled up with its end token.
        implementation: See ``prefill``.

    Returns:
        Tokens int32 [B, max_new_tokens], and the cache with all of them but the last, or up to a row's end token,
        in its tail.

    Raises:
        ValueError: If the tail has no room, or the context of the model would be exceeded.
    """
    check_model(model)
    check_cache(cache)
    check_same_mesh(model, cache)
    check_count("max_new_tokens", max_new_tokens, 1)
    key = check_key(sampler, key, logits.shape[0])
    longest = int(np.max(cache.tail_length)), int(np.max(cache.rope_position))
    check_room(model, cache, *(x + max_new_tokens - 1 for x in longest))
    ends, how = end_tokens(model, eos_token_ids), resolve(implementation, model)
    (key,) = place_rows(model.mesh, key=key)
    state = _decode(model, cache, logits, sampler, key, max_new_tokens, ends, how)
    return state.tokens, state.cache


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "eos_token_ids", "how"), donate_argnames="cache")
@on_mesh
def _decode(model, cache, logits, sampler, key, max_new_tokens, eos_token_ids, how):
    return run_decode(model, cache, logits, sampler, key, max_new_tokens, eos_token_ids, how)


def run_decode(
    model,
    cache,
    logits,
    sampler,
    key,
    max_new_tokens,
    eos_token_ids,
    how: Implementations = Implementations(),
) -> DecodeState:
    """``decode`` without checks, to be called under ``jit``."""
    state = begin(cache, logits, sampler, key, max_new_tokens, eos_token_ids)
    return advance(model, state, sampler, key, max_new_tokens, eos_token_ids, how)


def check_key(sampler: Sampler, key: Array | None, batch: int) -> Array:
    """Checks sampler and key; gives some key where the sampler needs none."""
    if not isinstance(sampler, Greedy | Sample):
        raise TypeError(f"sampler: expected Greedy() or Sample(...), got {sampler!r}")
    if key is None:
        if isinstance(sampler, Sample):
            raise ValueError("key: Sample needs a random key, e.g. jax.random.key(0)")
        return jax.random.key(0)
    if _is_legacy(key):
        key = jax.random.wrap_key_data(key)
    if not jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key) or key.shape not in ((), (batch,)):
        raise ValueError(f"key: expected one jax.random.key, or {batch}, got {key!r}")
    return key


def _is_legacy(key) -> bool:
    """Whether it is what ``jax.random.PRNGKey`` gives, or several of them."""
    size = jax.random.key_data(jax.random.key(0)).shape
    return getattr(key, "dtype", None) == jnp.uint32 and key.shape[-1:] == size


def end_tokens(model: Transformer, eos_token_ids) -> tuple[int, ...]:
    """The tokens that end a generation, given or the model's own."""
    known = eos_token_ids is None or (
        isinstance(eos_token_ids, Iterable) and all(isinstance(token, numbers.Integral) for token in eos_token_ids)
    )
    if not known:
        raise ValueError(f"eos_token_ids: expected token ids such as (2,), got {eos_token_ids!r}")
    if eos_token_ids is None:
        return model.config.eos_token_ids
    ends = tuple(int(x) for x in eos_token_ids)
    outside = [token for token in ends if not 0 <= token < model.config.vocab_size]
    if outside:
        raise ValueError(f"eos_token_ids: expected 0 to {model.config.vocab_size - 1}, got {outside[0]}")
    return ends
