"""SeKV's memory of a prompt's spans: a summary of each on the device, low-rank factors of its rows on the host."""

import dataclasses

import jax
import jax.numpy as jnp

from kvec_jax import host
from kvec_jax.online_softmax import Partial
from kvec_jax.sekv.zoom import attend_spans
from kvec_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanMemory:
    """The spans of a prompt, behind the ``beyond`` of a cache; how they are attended is in ``kvec_jax.sekv.zoom``.

    S is the number of spans, Z that of slots: spans that are expanded, or were lately. A *rank row* is what rank r adds
    to a span's keys and values: the r-th columns of the left factors and rows of the right ones, end to end,
    ``[left keys | right keys | left values | right values]``, X = 2 * (max_span + D) numbers.

    Attributes:
        keys, values: [L, B, K, S, D], summaries.
        counts: int32 [B, S], tokens of each span; 0 where there is none.
        ranks: int32 [B, S].
        offsets: int32 [B, S], first rank row of each span.
        factors: [L * B * K * F, X], F rank rows for each layer, row and head, in the host's memory where that is apart.
        slot_spans: int32 [L, B, K, Z], which span is in each slot; -1 for none.
        slots: [L, B, K, Z, R, X], rank rows of the spans in the slots; rows beyond a span's rank are of others.
        allowed: int32 [B], slots that a row may use at once.
        fetched: int32 [B], spans brought into slots so far.
        route, threshold: Of a trained head; ``None`` without one.
        norms: float32 [L, B, N, S], see ``route_norms``; ``None`` without a head.
        max_span: Static.
    """

    keys: Array
    values: Array
    counts: Array
    ranks: Array
    offsets: Array
    factors: Array
    slot_spans: Array
    slots: Array
    allowed: Array
    fetched: Array
    route: Array | None
    threshold: Array | None
    norms: Array | None
    max_span: int = dataclasses.field(metadata={"static": True})

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device: everything but the factors, and the trained head, which is no part of a cache."""
        apart = self.factors.nbytes + sum(x.nbytes for x in (self.route, self.threshold) if x is not None)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self)) - apart

    @property
    def host_nbytes(self) -> int:
        """Bytes of the factors."""
        return self.factors.nbytes

    @property
    def slot_nbytes(self) -> int:
        """Bytes that move when a span is expanded."""
        return self.slots.dtype.itemsize * self.slots.shape[-2] * self.slots.shape[-1]

    @property
    def moved_nbytes(self) -> Array:
        """Bytes brought from the host so far, float32 [B]."""
        return self.fetched.astype(jnp.float32) * self.slot_nbytes

    def attend(self, queries: Array, layer: Array, real: Array, scale: float) -> tuple[Partial, "SpanMemory"]:
        """See ``kvec_jax.forms.Beyond``."""
        return attend_spans(self, queries, layer, real, scale)

    def take_rows(self, index: Array) -> "SpanMemory":
        """The rows ``index`` of the batch; see ``kvec_jax.forms.Beyond``."""
        axes = dict.fromkeys(("counts", "ranks", "offsets", "allowed", "fetched"), 0)
        axes |= dict.fromkeys(("keys", "values", "slot_spans", "slots", "norms"), 1)
        taken = {name: getattr(self, name) for name in axes if getattr(self, name) is not None}
        taken = {name: jnp.take(x, index, axis=axes[name]) for name, x in taken.items()}
        factors = host.to_device(self.factors).reshape(*self.slot_spans.shape[:2], -1)
        factors = jnp.take(factors, index, axis=1).reshape(-1, self.factors.shape[1])
        return dataclasses.replace(self, factors=host.beside(factors, self.factors), **taken)
