"""LaProx: output-aware scores, one selection over the whole model, https://arxiv.org/abs/2605.07234."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_choice, check_count, check_flag, check_kernel
from kvec_jax.policies.base import Observation, Policy, Scope, Stateless
from kvec_jax.scores import pool_scores
from kvec_jax.typing import Array
from kvec_jax.value_norms import quadratic_forms, value_norms

Reading = Literal["attn_mean", "score_mean", "exact"]


@dataclasses.dataclass(frozen=True)
class OutputContribution(Stateless):
    """LaProx's scores; see ``LaProx``."""

    window: int = 32
    kernel: int = 7
    reading: Reading = "attn_mean"
    normalize: bool = True

    def __post_init__(self):
        check_count("window", self.window, 1)
        check_kernel("kernel", self.kernel)
        check_choice("reading", self.reading, ("attn_mean", "score_mean", "exact"))
        check_flag("normalize", self.normalize)

    def prepare(self, model) -> Array:
        """Gram matrices W_O W_O^T of every layer: [L, N, D, D], or across a group's heads [L, K, G, G, D, D]."""
        return _grams(model.layers.output_projection, model.config, self.reading == "exact")

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Share of the layer's sum that each entry contributes, float32 [B, K, T]."""
        prefix = seen.lengths - self.window
        scores = _READINGS[self.reading](self, seen, prefix)
        inside = jnp.arange(scores.shape[-1]) < prefix[:, None, None]
        if self.normalize:
            total = seen.sum_over_heads(jnp.sum(jnp.where(inside, scores, 0), axis=2))
            scores = scores / jnp.where(total == 0, 1.0, total)[:, None, None]
        return scores, carry

    def _attn_mean(self, seen: Observation, prefix: Array) -> Array:

        def norm(weights, looks):
            return jnp.sqrt(jnp.sum(jnp.square(jnp.sum(weights, axis=0) / seen.group), axis=0))

        columns = seen.window_scores(self.window, norm)
        return self._pool(columns, prefix) * jnp.mean(_output_norms(seen), axis=2)

    def _score_mean(self, seen: Observation, prefix: Array) -> Array:
        B, K, T, _ = seen.keys.shape

        def norm(weights, looks):
            return jnp.sqrt(jnp.sum(jnp.square(weights), axis=1))

        columns = seen.window_scores(self.window, norm)  # [B, K, G, T]
        columns = self._pool(columns.reshape(B, -1, T), prefix).reshape(columns.shape)
        return jnp.mean(columns * _output_norms(seen), axis=2)

    def _exact(self, seen: Observation, prefix: Array) -> Array:
        def products(weights, looks):
            return jnp.sum(weights[:, None] * weights[None], axis=2)

        columns = seen.window_scores(self.window, products)  # [B, K, G, G, T]
        rows = _through_grams(quadratic_forms, seen).reshape(columns.shape)
        return self._pool(jnp.sqrt(jnp.maximum(jnp.sum(columns * rows, axis=(2, 3)), 0)), prefix)

    def _pool(self, scores: Array, prefix: Array) -> Array:
        return pool_scores(scores, prefix, self.kernel, "avg")


_READINGS = {
    "attn_mean": OutputContribution._attn_mean,
    "score_mean": OutputContribution._score_mean,
    "exact": OutputContribution._exact,
}


def _output_norms(seen: Observation) -> Array:
    """||v W_O|| of every entry through each query head of its group, float32 [B, K, G, T], by the Gram matrices."""
    return _through_grams(value_norms, seen)


def _through_grams(operation: Callable, seen: Observation) -> Array:
    _, K, _, D = seen.values.shape
    how = seen.implementations
    grams = seen.prepared.reshape(K, -1, D, D)
    return operation(seen.values, grams, implementation=how.value_norms, interpret=bool(how.interpret))


def _grams(projection: Array, config, crossed: bool) -> Array:
    def gram(layer):  # [N, D, M]
        heads = layer.astype(jnp.float32)
        if not crossed:
            return jnp.einsum("NDM,NEM->NDE", heads, heads, precision=lax.Precision.HIGHEST)
        groups = heads.reshape(config.num_key_value_heads, config.groups, *heads.shape[1:])
        return jnp.einsum("KGDM,KHEM->KGHDE", groups, groups, precision=lax.Precision.HIGHEST)

    return jax.jit(lambda x: lax.map(gram, x))(projection)


def LaProx(
    budget: Any,
    *,
    window: int = 32,
    kernel: int = 7,
    reading: Reading = "attn_mean",
    normalize: bool = True,
    scope: Scope = "model",
) -> Policy:
    """Keeps the entries that contribute most to the layers' outputs, wherever they are, https://arxiv.org/abs/2605.07234.

    The score of an entry (eq. 8 and 9) is the L2 norm of its column of attention over the last ``window`` queries times
    the L2 norm of v W_O: the weight with which sampling would best approximate the product of the two. It is divided by
    the layer's sum (eq. 12), and all entries of all layers and heads compete in one selection (algorithm 2). There is
    no floor but the window.

    The norm of v W_O comes from per-head Gram matrices, v W_O W_O^T v^T, computed once per model. The selection carries
    the best entries so far through the layers: the result is that of a selection at the end, with one layer's keys and
    values in memory at a time.

    Choices that the paper leaves open: the attention norm is average-pooled over ``kernel`` neighbours before the
    window, with zeros outside, then multiplied; the window is not in the layer's sum; of equal scores the lower layer,
    head and position wins.

    Args:
        budget: See ``Policy``; the average over all heads.
        window: Queries that look.
        kernel: Neighbours that are pooled.
        reading: How query heads that share a key-value head are taken together. ``"attn_mean"``: the norm of their mean
            attention times the mean of the norms of v W_O. ``"score_mean"``: the mean of the products. ``"exact"``: the
            Frobenius norm of what the entry adds to the output through all of them, pooled after.
        normalize: Whether to divide by the layer's sum.
        scope: ``"model"`` as published; ``"head"`` for its scores under an even budget.

    Example:
        >>> LaProx(128).scope
        'model'
    """
    scorer = OutputContribution(window, kernel, reading, normalize)
    return Policy(scorer=scorer, budget=budget, scope=scope, name="laprox")
