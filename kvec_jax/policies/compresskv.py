"""CompressKV: semantic retrieval heads choose for all heads of their layer, https://arxiv.org/abs/2508.02401."""

import dataclasses
import os

import jax.numpy as jnp
import numpy as np

from kvec_jax.arguments import check_count, check_kernel
from kvec_jax.calibrate.file import Calibration, load_calibration
from kvec_jax.models.config import ModelConfig
from kvec_jax.policies.base import Observation, Policy, Stateless
from kvec_jax.policies.budgets import Weighted
from kvec_jax.scores import pool_scores
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class RetrievalHeads(Stateless):
    """Attention of a few query heads of each layer, the same for all its key-value heads; see ``CompressKV``.

    Args:
        heads: Numbers of the query heads that choose, for each layer that compresses; empty means all of a layer's
            heads.
    """

    heads: tuple[tuple[int, ...], ...] = ()
    window: int = 8
    kernel: int = 5

    def __post_init__(self):
        check_count("window", self.window, 1)
        check_kernel("kernel", self.kernel)
        object.__setattr__(self, "heads", tuple(tuple(int(head) for head in layer) for layer in self.heads))

    def init(self, config: ModelConfig, batch: int, length: int) -> None:
        """Nothing is carried; checks that the heads are the model's."""
        layers, N = config.num_hidden_layers - len(config.local_layers), config.all_attention_heads
        if len(self.heads) != layers or any(not 0 <= head < N for layer in self.heads for head in layer):
            raise ValueError(
                f"calibration: expected heads 0 to {N - 1} for each of {layers} layers, got {len(self.heads)} layers "
                f"and heads up to {max((head for layer in self.heads for head in layer), default=-1)}"
            )

    def score(self, seen: Observation, carry: None) -> tuple[Array, None]:
        """Pooled mean attention of the layer's retrieval heads, float32 [B, K, T]."""
        weights = jnp.asarray(self._weights(seen.config.all_attention_heads))[seen.layer]
        weights = seen.own_heads(weights, axis=0).reshape(1, -1, seen.group, 1)

        def total(attention, looks):  # [G, W, S]
            return jnp.sum(attention, axis=1)

        scores = seen.sum_over_heads(jnp.sum(weights * seen.window_scores(self.window, total), axis=2))
        scores = scores / jnp.minimum(seen.lengths, self.window)[:, None]
        return pool_scores(seen.per_head(scores), seen.lengths - self.window, self.kernel, "avg"), carry

    def _weights(self, N: int) -> np.ndarray:
        """Weight of each query head in the mean, float32 [layers, N]."""
        weights = np.zeros((len(self.heads), N), np.float32)
        for row, heads in zip(weights, self.heads, strict=True):
            row[list(heads) or slice(None)] = 1 / (len(heads) or N)
        return weights


def CompressKV(
    budget: int | float,
    *,
    calibration: Calibration | str | os.PathLike,
    window: int = 8,
    kernel: int = 5,
    heads_per_layer: int = 4,
    low: int = 32,
    high: int = 3,
    sinks: int = 0,
) -> Policy:
    """Retrieval heads choose, and calibrated errors say how much each layer gets, https://arxiv.org/abs/2508.02401.

    The attention of the last ``window`` queries of the layer's best ``heads_per_layer`` semantic retrieval heads (found
    by asking for needles, eq. 5) is averaged and pooled; the same positions are kept for all key-value heads of the
    layer. Layer budgets follow the error that eviction causes in each layer's output (algorithm 1, see ``Weighted``).
    Query head n reads key-value head n // G.

    Choices: what a layer can't use of its budget goes to the others (the official code leaves it unused); layers
    without retrieval heads use all their heads; no sinks unless asked for, as published.

    Args:
        budget: Tokens per key-value head on average, or a share of the prompt.
        calibration: A ``Calibration``, a file that ``kvec calibrate`` wrote, or the name of a model whose calibration
            is shipped.
        window: Queries that look.
        kernel: Neighbours that are average-pooled.
        heads_per_layer: Retrieval heads that choose.
        low: Least budget of a layer.
        high: Most budget of a layer, as a multiple of ``budget``.
        sinks: First tokens that are always kept.

    Raises:
        LoadError: If there is no such calibration; it names the command that makes one.
    """
    if not isinstance(calibration, Calibration):
        calibration = load_calibration(calibration)
    heads = tuple(layer[:heads_per_layer] for layer in calibration.heads)
    rule = Weighted(weights=calibration.layer_weights, tokens=budget, low=max(low, window + sinks), high=high)
    return Policy(
        scorer=RetrievalHeads(heads=heads, window=window, kernel=kernel), budget=rule, sinks=sinks, name="compresskv"
    )
