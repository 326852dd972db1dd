"""The decoding loop: its state, how it begins, and how it goes on; nothing in it waits for the host."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.cache import CompressedKV
from kvec_jax.extend import run_extend
from kvec_jax.implementations import Implementations
from kvec_jax.models.transformer import Transformer
from kvec_jax.sampling import Sampler, keys_of_rows
from kvec_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """A generation under way.

    Attributes:
        tokens: int32 [B, capacity], generated so far; each row's newest token fills the rest of it.
        count: int32 scalar, how many columns of ``tokens`` were generated.
        done: bool [B], rows that have met an end token.
        cache: With all tokens but the newest.
    """

    tokens: Array
    count: Array
    done: Array
    cache: CompressedKV


def begin(
    cache: CompressedKV, logits: Array, sampler: Sampler, key: Array, capacity: int, eos_token_ids: tuple[int, ...]
) -> DecodeState:
    """The state after the first token, which is chosen from ``logits`` [B, V] of the last token in the cache."""
    first = choose_tokens(sampler, key, logits, cache.next_position)
    return DecodeState(
        tokens=jnp.broadcast_to(first[:, None], (first.shape[0], capacity)),
        count=jnp.int32(1),
        done=is_end(first, eos_token_ids),
        cache=cache,
    )


def advance(
    model: Transformer,
    state: DecodeState,
    sampler: Sampler,
    key: Array,
    until: Array | int,
    eos_token_ids: tuple[int, ...],
    how: Implementations = Implementations(),
    make_room: Callable[[CompressedKV, Array], CompressedKV] | None = None,
) -> DecodeState:
    """Goes on until ``until`` tokens are generated, or every row has met an end token.

    A token depends on the key, its row and its position, not on how often the loop was left and entered again.
    ``make_room(cache, lengths)`` is called before so many tokens are added, for caches whose tail may be full.
    """
    columns = jnp.arange(state.tokens.shape[1])

    def unfinished(state):
        return (state.count < until) & model.config.part.any_row(~state.done)

    def step(state):
        newest = state.tokens[:, -1]
        lengths = jnp.where(state.done, 0, 1)  # a row that is done stands still
        cache = state.cache if make_room is None else make_room(state.cache, lengths)
        logits, cache = run_extend(model, cache, newest[:, None], lengths, how=how)
        logits = sampler.penalise(logits, state.tokens, state.count)
        chosen = choose_tokens(sampler, key, logits, cache.next_position)
        token = jnp.where(state.done, newest, chosen)
        return DecodeState(
            tokens=jnp.where(columns >= state.count, token[:, None], state.tokens),
            count=state.count + 1,
            done=state.done | is_end(token, eos_token_ids),
            cache=cache,
        )

    return lax.while_loop(unfinished, step, state)


def choose_tokens(sampler: Sampler, key: Array, logits: Array, positions: Array) -> Array:
    """One token per row; row b's key comes from ``key`` (one for all, or one per row), b, and the row's position."""
    keys = key if key.ndim else keys_of_rows(key, logits.shape[0])
    return sampler(logits, jax.vmap(jax.random.fold_in)(keys, positions))


def is_end(tokens: Array, eos_token_ids: tuple[int, ...]) -> Array:
    """Which of the tokens are end tokens: bool of their shape."""
    return jnp.any(tokens[:, None] == jnp.array(eos_token_ids, jnp.int32), axis=-1)
