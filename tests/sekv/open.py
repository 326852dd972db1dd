"""SeKV with sizes that a test names, whatever their bytes."""

import dataclasses

import jax.numpy as jnp

from kvec_jax.sekv.plan import Limits
from kvec_jax.sekv.policy import SeKV


@dataclasses.dataclass(frozen=True)
class Sized(SeKV):
    """``slots`` may be read at once; ``full_rank`` keeps all of every span."""

    window: int = 10
    anchors: int = 12
    slots: int = 0
    full_rank: bool = True

    def limits(self, config, lengths, T, itemsize):
        B, D, J = lengths.shape[0], config.head_dim, self.max_span
        spans = T // self.min_span + 1
        slots = min(self.slots, spans)
        window = jnp.minimum(self.window, lengths)
        sinks = jnp.minimum(self.sinks, lengths - window)
        return Limits(
            window=window,
            sinks=sinks,
            anchors=jnp.full(B, self.anchors, jnp.int32),
            slots=jnp.full(B, slots, jnp.int32),
            min_span=self.min_span,
            max_span=J,
            max_exact=self.window + self.sinks + self.anchors,
            max_spans=spans,
            max_slots=slots,
            max_rank=D if self.full_rank else self.max_rank,
            rank_share=(J + D) / D if self.full_rank else self.rank_share,
        )


EVERYTHING = 10_000
