"""How many bytes of the device each part of SeKV's memory may take, for prompts of every length."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from kvec_jax.typing import Array

# Shares of the device's bytes: exact rows and coarse rows; the rest is for spans that are expanded.
_EXACT_SHARE, _COARSE_SHARE = 0.35, 0.3
# Of the exact rows, those of the recent window; the rest are sinks and anchors.
_WINDOW_SHARE = 0.6
_LONGEST_WINDOW = 512
_LONGEST_SPAN = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a prompt's segmentation and memory; fields with [B] may differ from row to row.

    Attributes:
        window: int32 [B], last tokens that stay exact.
        sinks: int32 [B], first tokens that stay exact.
        anchors: int32 [B], most surprising tokens that may stay exact besides.
        slots: int32 [B], spans that may be expanded at once, in a layer and key-value head.
        min_span, max_span: Tokens of a span; only the last one of a prompt may be shorter.
        max_exact, max_spans, max_slots: Static sizes that hold every row of the batch.
        max_rank: Most rank of a span's factors.
        rank_share: Bytes of a span's factors as a share of those of its rows, at most.
    """

    window: Array
    sinks: Array
    anchors: Array
    slots: Array
    min_span: int
    max_span: int
    max_exact: int
    max_spans: int
    max_slots: int
    max_rank: int = 32
    rank_share: float = 0.25

    def rank(self, tokens, head_dim: int, xp=jnp):
        """Rank of the factors of a span of that many ``tokens``, by ``xp`` (``numpy`` or ``jax.numpy``).

        Factors take ``rank * (max_span + D)`` numbers, rows ``tokens * D``; a rank is at least 1.
        """
        width = self.max_span + head_dim
        # Whole numbers, so that host and device agree.
        allowed = (tokens * round(1000 * self.rank_share) * head_dim) // (1000 * width)
        most = xp.minimum(xp.minimum(tokens, head_dim), self.max_rank)
        return xp.clip(allowed, xp.minimum(tokens, 1), most)

    def rank_rows(self, T: int, head_dim: int) -> int:
        """Rank rows that hold the factors of any spans of T tokens, and one more slice of the largest; static."""
        largest = int(self.rank(self.max_span, head_dim, np))
        allowed = T * round(1000 * self.rank_share) * head_dim // (1000 * (self.max_span + head_dim))
        return min(self.max_spans * largest, allowed + self.max_spans) + largest


def span_lengths(device_share: float, min_span: int, max_span: int | None) -> tuple[int, int]:
    """Shortest and longest span for a share: summaries of the shortest fit their part of the device's bytes.

    Example:
        >>> span_lengths(0.1, 16, None), span_lengths(0.2, 16, None)
        ((34, 64), (17, 32))
    """
    longest = _LONGEST_SPAN if max_span is None else max_span
    shortest = min(max(min_span, math.ceil(1 / (_COARSE_SHARE * device_share))), longest)
    # A multiple of 16, which TPUs and GPUs like.
    return shortest, max(shortest, min(2 * shortest // 16 * 16, longest)) if max_span is None else max_span


def make_limits(
    lengths: Array,
    T: int,
    *,
    device_share: float,
    head_dim: int,
    groups: int,
    itemsize: int,
    sinks: int = 4,
    min_span: int = 16,
    max_span: int | None = None,
    max_rank: int = 32,
    rank_share: float = 0.25,
) -> Limits:
    """Divides ``device_share`` of a full cache's bytes among exact rows, summaries and expanded spans.

    The sum of the parts is within the share by construction, whatever the text. Every row of a batch gets what its own
    length allows, however far it is padded. Prompts of a few tokens are the exception: there is always one exact row,
    and one summary.

    Args:
        lengths: int32 [B], may be traced.
        T: Longest length; static.
        device_share: In (0, 1]; at 1 everything is exact.
        head_dim: D.
        groups: G, query heads per key-value head.
        itemsize: Bytes of a number in the cache.
        sinks: See ``SeKV``, as for the others.
        min_span: Fewest tokens of a span, before the share asks for more.
        max_span: Most tokens of a span.
        max_rank: Most rank of its factors.
        rank_share: Most bytes of its factors, as a share of those of its rows.

    Returns:
        The limits of each row, and sizes that hold all of them.
    """
    shortest, longest = span_lengths(device_share, min_span, max_span)
    row = 2 * head_dim * itemsize  # bytes of one key and value
    exact_cost = row + 4  # position
    coarse_cost = row + 4 * groups + 12  # norms of the routing keys; length, rank and offset
    limits = Limits(
        window=None, sinks=None, anchors=None, slots=None,
        min_span=shortest, max_span=longest, max_exact=0, max_spans=0, max_slots=0,
        max_rank=max_rank, rank_share=rank_share,
    )  # fmt: skip
    slot_cost = int(limits.rank(longest, head_dim, np)) * 2 * (longest + head_dim) * itemsize + 4

    n = np.arange(T + 1)
    budget = device_share * n * row - 64  # starts, counts and the like
    spans = n // shortest + 1
    exact = np.maximum(np.floor(_EXACT_SHARE * budget / exact_cost), 1).astype(int)
    slots = np.floor(((1 - _EXACT_SHARE) * budget - coarse_cost * spans) / slot_cost)
    slots = np.clip(slots, 0, spans).astype(int)
    everything = device_share >= 1 or exact >= n
    exact = np.where(everything, n, exact)
    window = np.where(everything, n, np.clip(np.ceil(_WINDOW_SHARE * exact), 1, _LONGEST_WINDOW)).astype(int)
    first = np.minimum(sinks, exact - window)
    compressed = n - exact
    tables = dict(window=window, sinks=first, anchors=exact - window - first, slots=np.where(compressed > 0, slots, 0))
    return dataclasses.replace(
        limits,
        **{name: jnp.asarray(table, jnp.int32)[lengths] for name, table in tables.items()},
        max_exact=int(exact.max()),
        max_spans=int(np.max(np.where(compressed > 0, spans, 0))),
        max_slots=int(tables["slots"].max()),
    )
