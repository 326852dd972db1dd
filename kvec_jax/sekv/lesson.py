"""What a zoom-in head learns from: windows of text, read by the frozen model, with memories of all but their ends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvec_jax.models.transformer import Transformer
from kvec_jax.sekv.build import span_weights, summaries_and_factors
from kvec_jax.sekv.plan import Limits
from kvec_jax.sekv.policy import SeKV, read_everything
from kvec_jax.sekv.spans import Spans, segment, surprisals
from kvec_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """Of the keys, or the values, of all spans: ``left @ right`` approximates their rows.

    Attributes:
        mean: [L, B, K, S, D].
        left: [L, B, K, S, max_span, R].
        right: [L, B, K, S, R, D].
        singular: float32 [L, B, K, S, R].
    """

    mean: Array
    left: Array
    right: Array
    singular: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
    """Windows whose first T tokens are a prompt and whose last Q tokens are to be predicted from its memory.

    Attributes:
        questions: int32 [B, Q], the last tokens.
        teacher: float32 [B, Q, V], logits that full attention gives there.
        exact_keys, exact_values: [L, B, K, T, D], of the prompt.
        keys, values: Factors of the prompt's spans.
        spans: Of the prompt.
        ranks: int32 [B, S].
        slots: int32 [B], spans that may be expanded at once.
        places: Static. No less than any of ``slots``.
    """

    questions: Array
    teacher: Array
    exact_keys: Array
    exact_values: Array
    keys: Factors
    values: Factors
    spans: Spans
    ranks: Array
    slots: Array
    places: int = dataclasses.field(metadata={"static": True})

    @property
    def length(self) -> int:
        """T: tokens of the prompt."""
        return self.exact_keys.shape[3]


def make_lesson(model: Transformer, tokens: Array, queries: int, policy: SeKV) -> Lesson:
    """Reads windows of text with full attention, and makes SeKV's memory of all but their last tokens.

    The memory holds nothing of the tokens to be predicted, so that every label is causal.

    Args:
        model: Frozen: no gradient goes through what is made here.
        tokens: int32 [B, T + Q].
        queries: Q.
        policy: Its sizes are those of the memory.
    """
    B, total = tokens.shape
    T = total - queries
    hidden, keys, values = read_everything(model, tokens, jnp.full(B, total, jnp.int32))
    lengths = jnp.full(B, T, jnp.int32)
    limits = policy.limits(model.config, lengths, T, keys.dtype.itemsize)
    surprisal = surprisals(model, hidden[:, :T], tokens[:, :T])
    spans = segment(surprisal, lengths, limits, policy.alpha)
    keys, values = keys[..., :T, :], values[..., :T, :]
    of_keys, of_values = _factors(keys, values, surprisal, spans, limits)
    lesson = Lesson(
        questions=tokens[:, T:],
        teacher=model.unembed(hidden[:, T:]),
        exact_keys=keys,
        exact_values=values,
        keys=of_keys,
        values=of_values,
        spans=spans,
        ranks=limits.rank(spans.counts, model.config.head_dim),
        slots=limits.slots,
        places=limits.max_slots,
    )
    return jax.tree.map(lax.stop_gradient, lesson)


def _factors(keys: Array, values: Array, surprisal: Array, spans: Spans, limits: Limits) -> tuple[Factors, Factors]:
    weights = span_weights(surprisal, spans)
    rank = int(limits.rank(limits.max_span, keys.shape[-1], np))
    found = lax.map(lambda rows: summaries_and_factors(*rows, spans, weights, rank), (keys, values))
    mean, left, right = (x.astype(keys.dtype) for x in found[:3])
    both = Factors(mean=mean, left=left, right=right, singular=found[3])
    K = keys.shape[2]
    return jax.tree.map(lambda x: x[:, :, :K], both), jax.tree.map(lambda x: x[:, :, K:], both)
