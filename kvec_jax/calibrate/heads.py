"""Retrieval heads: which query heads look at a hidden answer while it is being given (CompressKV, eq. 5)."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.cache import CompressedKV
from kvec_jax.calibrate.haystack import common
from kvec_jax.calibrate.replay import Attending, compressing, greedy, pad, replay
from kvec_jax.extend import run_extend
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies import FullCache
from kvec_jax.prefill import run_prefill
from kvec_jax.running import cut_at_end
from kvec_jax.typing import Array

# A layer whose best head scores less than this has no retrieval heads.
LEAST_SCORE = 1e-3
_QUESTION_STEP = 32  # questions are padded to a multiple, so that few programs are compiled


def answer_scores(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    *,
    length: int,
    new: int,
) -> tuple[list[list[int]], np.ndarray]:
    """Answers several questions about one text greedily, and scores every head.

    A head's score is its attention mass on the whole hidden answer, summed over the steps whose token is one of the
    hidden answer's: the paper's reading, an indicator per step; a token that stands in the answer twice counts once.

    What the prompts have in common is read once; each question sees that text and itself alone, as if it had been read
    for it.

    Args:
        model: The decoder.
        prompts: Tokens of each prompt: the text with the hidden answers, then one of the questions.
        spans: For each prompt the first token of its hidden answer and one past its last.
        length: To which the text is padded.
        new: Most tokens to generate.

    Returns:
        Each prompt's generated tokens, and scores float32 [prompts, layers that compress, N].
    """
    shared = min(common(prompts), min(map(len, prompts)) - 1)
    text, text_length = pad([prompts[0][:shared]], length)
    rest = [prompt[shared:] for prompt in prompts]
    questions, question_lengths = pad(rest, -(-max(map(len, rest)) // _QUESTION_STEP) * _QUESTION_STEP)
    answer = _answer(model, text, text_length, questions, question_lengths, np.array(spans, np.int32), new)
    responses, mass = jax.tree.map(np.asarray, answer)
    rows = [cut_at_end(row, model.config.eos_token_ids) for row in responses.tolist()]
    mass = mass[compressing(model.config)]
    scores = []
    for i, (response, prompt, span) in enumerate(zip(rows, prompts, spans, strict=True)):
        counted = np.isin(response, prompt[slice(*span)])
        scores.append(mass[:, i, :, : len(response)][..., counted].sum(axis=-1))
    return rows, np.stack(scores)


def rank_heads(scores: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Heads of every layer, best first and of equal ones the lower number, from scores [layers, N].

    Example:
        >>> rank_heads(np.array([[0.2, 0.5, 0.5], [0.0, 0.0, 0.0]]))
        ((1, 2, 0), ())
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    return tuple(tuple(row.tolist()) if best >= LEAST_SCORE else () for row, best in zip(order, scores.max(axis=1)))


@functools.partial(jax.jit, static_argnames="new")
def _answer(model, text, text_length, questions, question_lengths, spans, new):
    """Answers int32 [B, new], and the attention mass [L, B, N, new] on the span with which each token was predicted."""
    room = questions.shape[1] + new
    _, cache = run_prefill(model, None, text, text_length, FullCache(), room)
    cache = cache.take_rows(jnp.zeros(questions.shape[0], jnp.int32))
    # The last token of a question is left out of the cache: its query predicts the answer's first.
    _, cache = run_extend(model, cache, questions, question_lengths - 1)
    last = jnp.take_along_axis(questions, question_lengths[:, None] - 1, axis=1)
    logits, longer = run_extend(model, cache, last, jnp.ones_like(question_lengths))
    response = greedy(model, longer, logits, new)
    asking = jnp.concatenate([last, response[:, :-1]], axis=1)
    marked = mark(cache, spans)

    def mass(seen: Attending) -> Array:
        return seen.over(marked, jnp.zeros_like(seen.values))[..., 0]

    return response, replay(model, cache, asking, mass)


def mark(cache: CompressedKV, spans: Array) -> CompressedKV:
    """The cache with values of 1 at the positions of ``spans`` [B, 2] and of 0 elsewhere.

    Attention over it gives the attention mass on the span, whatever the layout of the cache.
    """
    inside = (cache.positions >= spans[:, :1]) & (cache.positions < spans[:, 1:])
    values = jnp.broadcast_to(inside[..., None], cache.values.shape).astype(cache.values.dtype)
    return dataclasses.replace(cache, values=values, tail_values=jnp.zeros_like(cache.tail_values))
