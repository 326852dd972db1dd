"""What the last queries of a prompt say about its keys, reduced key by key."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from kvec_jax.pallas.dispatch import choose, differentiable
from kvec_jax.typing import Array, Implementation

KEY_BLOCK = 1024


def window_scores(
    queries: Array,
    positions: Array,
    keys: Array,
    reduce: Callable[[Array, Array], Any],
    *,
    scale: float,
    rivals: Callable[[Array], Array] | None = None,
    logsumexp: Array | None = None,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Any:
    """Causal softmax attention of a few queries over all keys, reduced to statistics of each key.

    The weights [N, W, T] never exist at once: the keys are read block by block, once if the softmax's denominators are
    known, and twice otherwise. ``reduce`` and ``rivals`` are traced into every implementation, kernels included, so
    that a scorer states its statistics once.

    Args:
        queries: [B, N, W, D], after RoPE.
        positions: int32 [B, W] of the queries; those below 0 look at nothing: their rows of weights are zeros.
        keys: [B, K, T, D], key t at position t. No query is at or after a row's padding, so padding gets no weight.
        reduce: Called with the weights float32 [G, W, S] of one key-value head's queries over some S keys, and bool
            [W, 1], which of the queries look. Gives any pytree of arrays [..., S]. Kernels add heads behind and queries
            in front, with weights of zero, so it only adds up, or takes the largest, over heads and queries: a mean is
            a sum divided by the number that the caller knows. It may not hold arrays.
        scale: Factor on the logits.
        rivals: Called like ``reduce``, with the weights alone; gives [W, S]. Its largest over the key-value heads,
            added up over the queries, is returned too.
        logsumexp: float32 [B, N, W], log-sum-exp of the queries' logits over the keys they see, where it is known.
        implementation: See ``kvec_jax.Implementations``.
        interpret: Whether a kernel is interpreted.

    Returns:
        The pytree that ``reduce`` gives, with [B, K, ..., T] in place of [..., S]; with ``rivals``, a pair of that and
        float32 [B, T].

    Raises:
        UnsupportedError: If the implementation that was asked for can't do this.

    Example:
        >>> x = jnp.ones((1, 1, 3, 2))
        >>> def mean(weights, looks):
        ...     return jnp.sum(weights, axis=(0, 1)) / 3
        >>> scores = window_scores(x, jnp.array([[0, 1, 2]]), x, mean, scale=1.0)[0, 0]
        >>> [f"{score:.3f}" for score in scores.tolist()]
        ['0.611', '0.278', '0.111']
    """
    B, N, W, D = queries.shape
    K = keys.shape[1]
    queries = queries.reshape(B, K, N // K, W, D)
    if logsumexp is not None:
        logsumexp = logsumexp.reshape(B, K, N // K, W)

    def run(name):
        kernels = _kernels(name)

        def scores(queries, positions, keys, logsumexp):
            if logsumexp is None:
                logsumexp = kernels.logsumexp(queries, positions, keys, scale, interpret)
            return kernels.statistics(queries, positions, keys, logsumexp, reduce, rivals, scale, interpret)

        return scores

    chosen = choose("window_scores", implementation, **_refusals(queries, keys))
    function = run("xla") if chosen == "xla" else differentiable(run(chosen), run("xla"))
    found, peak = function(queries, positions, keys, logsumexp)
    return found if rivals is None else (found, peak)


def _refusals(queries: Array, keys: Array) -> dict[str, str | None]:
    return {name: _kernels(name).refusal(queries, keys) for name in ("pallas_tpu", "pallas_gpu")}


def _kernels(name: str):
    """The module of an implementation; all have ``statistics`` and ``logsumexp``."""
    if name == "pallas_tpu":
        from kvec_jax.pallas import window_scores_tpu as kernels
    elif name == "pallas_gpu":
        from kvec_jax.pallas import window_scores_triton as kernels
    else:
        from kvec_jax.pallas import window_scores_reference as kernels
    return kernels


def pool_scores(scores: Array, lengths: Array, kernel: int, pooling: str) -> Array:
    """Spreads each score over its neighbours, within the first ``lengths`` entries of a row.

    Args:
        scores: float32 [B, K, T].
        lengths: int32 [B]: what lies at and after it neither gives nor gets.
        kernel: Odd number of neighbours, the entry itself included.
        pooling: ``"max"``, or ``"avg"``: the sum of the neighbours divided by ``kernel``, at the borders too.

    Returns:
        float32 [B, K, T].
    """
    inside = jnp.arange(scores.shape[-1]) < lengths[:, None, None]
    outside, combine = (0.0, jnp.add) if pooling == "avg" else (-jnp.inf, jnp.maximum)
    half = kernel // 2
    T = scores.shape[-1]
    padded = jnp.pad(jnp.where(inside, scores, outside), [(0, 0), (0, 0), (half, half)], constant_values=outside)
    pooled = padded[..., :T]
    for shift in range(1, kernel):
        pooled = combine(pooled, padded[..., shift : shift + T])
    return pooled / kernel if pooling == "avg" else pooled
