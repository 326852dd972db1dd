"""Every eviction method in one sentence: score the entries, then keep the best n among those that compete."""

import dataclasses
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_choice, check_count
from kvec_jax.models.config import ModelConfig
from kvec_jax.policies.budgets import Even
from kvec_jax.select import FIRST_KEY, LOWEST_KEY, ordered_keys
from kvec_jax.typing import Array

Scope = Literal["head", "layer", "model"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What one layer shows of a prompt to the scorer; what a scorer does not read is never computed.

    Attributes:
        queries: [B, N, T, D], after RoPE.
        keys: [B, K, T, D], after RoPE.
        values: [B, K, T, D].
        lengths: int32 [B]; tokens at and after a row's length are padding.
        output_projection: [N, D, M], W_O of each head.
        layer: int32 scalar, traced: number of the layer among those that compress.
        num_layers: Static. How many layers compress.
        scale: Static. Factor on the logits of attention.
    """

    queries: Array
    keys: Array
    values: Array
    lengths: Array
    output_projection: Array
    layer: Array
    num_layers: int = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})

    def last_queries(self, count: int) -> tuple[Array, Array]:
        """Queries of each row's last ``count`` real tokens.

        Returns:
            Queries [B, N, count, D], and their positions int32 [B, count], which are negative for tokens that a row
            shorter than ``count`` doesn't have.
        """
        positions = self.lengths[:, None] - count + jnp.arange(count)
        index = jnp.maximum(positions, 0)[:, None, :, None]
        return jnp.take_along_axis(self.queries, index, axis=2), positions


class Scorer(Protocol):
    """Says how much each entry of a layer matters. A frozen dataclass, so that it can be a static argument of ``jit``.

    Attributes:
        window: Tokens at the end of the prompt that are always kept.
    """

    window: int

    def init(self, config: ModelConfig, batch: int, length: int) -> Any:
        """What is carried into the first layer: any pytree."""

    def score(self, seen: Observation, carry: Any) -> tuple[Array, Any]:
        """Scores float32 [B, K, T] of one layer, and what is carried on."""

    def after(self, kept: Array, carry: Any) -> Any:
        """What is carried on once it is known which entries ``kept`` bool [B, K, T] were chosen."""


@dataclasses.dataclass(frozen=True)
class Stateless:
    """Base of scorers that carry nothing from layer to layer; a subclass defines ``score``."""

    window: int = 0

    def init(self, config: ModelConfig, batch: int, length: int) -> None:
        """Nothing is carried."""

    def after(self, kept: Array, carry: None) -> None:
        """Nothing is carried."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What to keep of a prompt's cache: a scorer, who competes with whom, and for how many places.

    Any scorer goes with any scope and any budget.

    Args:
        scorer: How much each entry matters.
        budget: Tokens per key-value head, on average over those that compete: an int (window and sinks inside it), a
            float share of the prompt in (0, 1], or a budget rule such as ``Even``.
        scope: ``"head"``: each head keeps its own best ``budget``; ``"layer"``: the heads of a layer compete for
            ``K * budget`` places.
        sinks: Tokens at the beginning of the prompt that are always kept.
        name: What tables call it.

    Raises:
        TypeError, ValueError: For a budget, scope or number of sinks that makes no sense.

    Example:
        >>> import kvec_jax as kv
        >>> kv.Policy(scorer=kv.WindowAttention(window=16), budget=128, scope="layer").budget
        Even(tokens=128)
    """

    scorer: Scorer
    budget: Any
    scope: Scope = "head"
    sinks: int = 0
    name: str = "policy"

    def __post_init__(self):
        if not hasattr(self.budget, "per_layer"):
            object.__setattr__(self, "budget", Even(self.budget))
        check_choice("scope", self.scope, ("head", "layer"))
        check_count("sinks", self.sinks, 0)
        always = self.scorer.window + self.sinks
        tokens = getattr(self.budget, "tokens", None)
        if isinstance(tokens, int) and tokens < always:
            raise ValueError(
                f"budget: expected at least {always} tokens (window {self.scorer.window} and sinks {self.sinks}, "
                f"which are always kept), got {tokens}"
            )

    def keys(self, scores: Array, lengths: Array) -> Array:
        """Order of the entries, int32 [B, K, T], from scores [B, K, T]: protected ones first, padding last.

        Where even the protected ones don't all fit (a share of a short prompt), the newest come first, then the sinks.
        """
        at = jnp.arange(scores.shape[-1])
        age = lengths[:, None, None] - 1 - at  # 0 for the last token, negative for padding
        window = self.scorer.window
        keys = jnp.where(at < self.sinks, FIRST_KEY - window - at, ordered_keys(scores))
        keys = jnp.where(age < window, FIRST_KEY - age, keys)
        return jnp.where(age < 0, LOWEST_KEY, keys)


def window_keys(lengths: Array, shape: tuple[int, ...]) -> Array:
    """Order int32 ``shape`` [B, K, T] by age alone, newest first, padding last: what a local layer keeps."""
    at = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return jnp.where(at < lengths[:, None, None], at, LOWEST_KEY)
