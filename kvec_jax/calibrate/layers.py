"""Layer weights: how wrong each layer's output becomes when almost all of its cache is evicted (CompressKV, app. B)."""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.calibrate.replay import Attending, compressing, greedy, pad, replay
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies import FullCache, Policy
from kvec_jax.running import cut_at_end
from kvec_jax.sweep import run_sweep
from kvec_jax.typing import Array

_EPSILON = 1e-6


def eviction_errors(
    model: Transformer, prompts: Sequence[Sequence[int]], policy: Policy, *, length: int, new: int
) -> np.ndarray:
    """Errors of the layers' attention outputs while prompts are answered greedily from the full cache.

    At every step the same query attends to the full and to the compressed cache. The error is the Frobenius norm of the
    difference after W_O relative to the full output's; it is averaged over the steps, so that long answers don't count
    for more (the official code sums).

    Args:
        model: The decoder.
        prompts: Tokens of each prompt.
        policy: What the compressed cache keeps.
        length: To which the prompts are padded.
        new: Most tokens to generate.

    Returns:
        float32 [prompts, layers that compress].
    """
    tokens, lengths = pad(prompts, length)
    responses, errors = jax.tree.map(np.asarray, _errors(model, tokens, lengths, policy, new))
    counts = [len(cut_at_end(row, model.config.eos_token_ids)) for row in responses.tolist()]
    errors = errors[compressing(model.config)]
    return np.stack([errors[:, row, :count].mean(axis=-1) for row, count in enumerate(counts)])


def layer_weights(errors: Mapping[str, Sequence[np.ndarray]]) -> np.ndarray:
    """Weights that add up to 1: each kind of prompt has the same say, whatever the size of its errors.

    Args:
        errors: For each kind, errors [layers] of its prompts.

    Example:
        >>> layer_weights({"a": [np.array([1.0, 3.0])], "b": [np.array([30.0, 10.0])]}).tolist()
        [0.5, 0.5]
    """
    sums = [np.sum(np.stack(rows), axis=0) for rows in errors.values()]
    shares = np.sum([row / max(row.sum(), _EPSILON) for row in sums], axis=0)
    return shares / shares.sum() if shares.sum() else np.full(shares.shape, 1 / shares.size)


@functools.partial(jax.jit, static_argnames=("policy", "new"))
def _errors(model, tokens, lengths, policy, new):
    """Answers int32 [B, new], and the error [L, B, new] at each of their tokens."""
    policies, prepared = (FullCache(), policy), (None, policy.scorer.prepare(model))
    logits, (full, small) = run_sweep(model, prepared, tokens, lengths, policies, new)
    response = greedy(model, full, logits, new)

    def error(seen: Attending) -> Array:
        right, wrong = (seen.project(x).astype(jnp.float32) for x in (seen.output, seen.over(small, seen.values)))
        return jnp.linalg.norm(wrong - right, axis=-1) / (jnp.linalg.norm(right, axis=-1) + _EPSILON)

    return response, replay(model, full, response, error)
