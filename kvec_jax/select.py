"""Exact selection of the best entries, and packing of what was selected."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.pallas.dispatch import choose
from kvec_jax.part import WHOLE, Part
from kvec_jax.typing import Array, Implementation


def ordered_keys(scores: Array) -> Array:
    """Integers in the order of floats.

    Args:
        scores: float32 of any shape.

    Returns:
        int32 of the same shape: larger scores have larger keys; equal scores equal ones (-0.0 counts as 0.0). NaN ranks
        below every number, so that it is never chosen before one.

    Example:
        >>> ordered_keys(jnp.array([-1.0, 0.0, 2.0])).tolist()
        [-1065353217, 0, 1073741824]
    """
    scores = scores.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    return jnp.where(jnp.isnan(scores), LOWEST_KEY + 1, keys)


# Below the key of every score: what must never be kept.
LOWEST_KEY = -(2**31)
# Above the key of infinity; ``FIRST_KEY - rank`` orders what must be kept before anything else.
FIRST_KEY = 2**31 - 1


def top_k_mask(
    keys: Array,
    k: Array,
    rank: Array | None = None,
    *,
    part: Part = WHOLE,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Array:
    """Marks the ``k`` largest keys along the last axis; of equal ones those that come first.

    The k-th largest key is found bit by bit: 32 counts of how many keys are at least a candidate. No sort, exact for
    any length and any k, which may differ from row to row and be traced.

    Args:
        keys: int32 [..., S], see ``ordered_keys``.
        k: int32 [...] or scalar, how many to mark; from 0 up. All are marked where ``k >= S``.
        rank: int32 [..., S], distinct and from 0 up: which of equal keys comes first. ``None`` means the lower index.
        part: Static. Over how many devices the keys are divided: ``k`` are marked among those of all, each marks its
            own, and of equal keys the first device's come first. Only counts pass between the devices.
        implementation: See ``kvec_jax.Implementations``.
        interpret: Whether a kernel is interpreted.

    Returns:
        bool [..., S].

    Raises:
        UnsupportedError: If the implementation that was asked for can't do this.

    Example:
        >>> top_k_mask(jnp.array([3, 1, 3, 3]), 2).tolist()
        [True, False, True, False]
    """
    from kvec_jax.pallas import select_top_k_tpu, select_top_k_triton  # not before kernels may be needed

    k = jnp.broadcast_to(jnp.asarray(k, jnp.int32), keys.shape[:-1])
    spread = "the entries are on several devices" if part.heads > 1 else None
    refusals = dict(
        pallas_tpu=spread or select_top_k_tpu.refusal(keys, rank),
        pallas_gpu=spread or select_top_k_triton.refusal(keys, rank),
    )
    chosen = choose("select_top_k", implementation, **refusals)
    if chosen == "xla":
        return _top_k_mask(keys, k, rank, part)
    kernels = select_top_k_tpu if chosen == "pallas_tpu" else select_top_k_triton
    S = keys.shape[-1]
    rank = None if rank is None else rank.reshape(-1, S)
    mask = kernels.top_k_mask(keys.reshape(-1, S), jnp.minimum(k.reshape(-1), S), rank, interpret)
    return mask.reshape(keys.shape)


def _top_k_mask(keys: Array, k: Array, rank: Array | None, part: Part) -> Array:
    def count(marked):
        return jnp.sum(marked, axis=-1, dtype=jnp.int32)

    above, equal = split_at_largest(keys, lambda marked: part.sum(count(marked)) >= k)
    room = k - part.sum(count(above))
    if rank is None:
        room = room - part.before(count(equal))
        return above | (equal & (jnp.cumsum(equal, axis=-1) <= room[..., None]))
    return above | (equal & _top_k_mask(jnp.where(equal, -rank, LOWEST_KEY), room, None, part))


def split_at_largest(keys: Array, enough: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Finds, bit by bit, the largest threshold for which the keys from it up are enough.

    Args:
        keys: int32 [..., S].
        enough: From bool [..., S], the keys from a candidate up, to bool [...]. If it holds for some marked keys, it
            holds for more.

    Returns:
        bool [..., S] twice: keys above the threshold, and keys equal to it; the threshold is the lowest of all integers
        where nothing is enough.
    """
    unsigned = lax.bitcast_convert_type(keys, jnp.uint32) ^ jnp.uint32(0x80000000)

    # The marks are made inside the loop, from the very buffer that is counted. Outside, XLA may compute the keys
    # once more in another fusion, differently rounded, and an entry at the threshold would count but not be marked.
    def try_bit(i, state):
        candidate = state[0] | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        threshold = jnp.where(enough(unsigned >= candidate[..., None]), candidate, state[0])
        return threshold, unsigned > threshold[..., None], unsigned == threshold[..., None]

    nothing = jnp.zeros(keys.shape, bool)
    start = jnp.zeros(keys.shape[:-1], jnp.uint32), nothing, nothing
    return lax.fori_loop(0, 32, try_bit, start)[1:]


def indices_of(mask: Array, capacity: int) -> Array:
    """Indices of the marked places along the last axis, in order.

    Args:
        mask: bool [..., S].
        capacity: How many to give; static.

    Returns:
        int32 [..., capacity]: the first ``capacity`` marked indices, then S where fewer are marked.

    Example:
        >>> indices_of(jnp.array([True, False, True]), 3).tolist()
        [0, 2, 3]
    """
    S = mask.shape[-1]
    rank = jnp.cumsum(mask.reshape(-1, S), axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, capacity + 1)
    found = jax.vmap(lambda row: jnp.searchsorted(row, wanted))(rank)
    return found.reshape(*mask.shape[:-1], capacity)
