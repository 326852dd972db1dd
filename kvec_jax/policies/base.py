"""Every eviction method in one sentence: score the entries, then keep the best n among those that compete."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_choice, check_count, check_share
from kvec_jax.implementations import Implementations
from kvec_jax.models.config import ModelConfig
from kvec_jax.policies.budgets import BudgetRule, Even
from kvec_jax.scores import window_scores
from kvec_jax.select import FIRST_KEY, LOWEST_KEY, ordered_keys, top_k_mask
from kvec_jax.typing import Array

Scope = Literal["head", "layer", "model"]

# Order of the entries that a scorer forces in: above every score, below what is always kept.
_FORCED_KEY = FIRST_KEY - (1 << 20)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What one layer shows of a prompt to the scorer; what a scorer does not read is never computed.

    Where devices share the layer's heads, N and K are those of one of them; what concerns all heads of the layer goes
    through ``sum_over_heads``, ``all_heads`` and ``own_heads``.

    Attributes:
        queries: [B, N, T, D], after RoPE.
        raw_queries: [B, N, T, D], before RoPE.
        keys: [B, K, T, D], after RoPE.
        values: [B, K, T, D].
        lengths: int32 [B]; tokens at and after a row's length are padding.
        output_matrix: [N * D, M], the layer's W_O; of a layer that devices share, some columns of it.
        prepared: What the scorer's ``prepare`` made of this layer's weights.
        layer: int32 scalar, traced: number of the layer among those that compress.
        logsumexp: float32 [B, N, T], log-sum-exp of the queries' logits, where the attention gives it.
        num_layers: Static. How many layers compress.
        config: Static. Of the model.
        implementations: Static. How operations are carried out.
    """

    queries: Array
    raw_queries: Array
    keys: Array
    values: Array
    lengths: Array
    output_matrix: Array
    prepared: Any
    layer: Array
    logsumexp: Array | None = None
    num_layers: int = dataclasses.field(metadata={"static": True})
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    implementations: Implementations = dataclasses.field(default=Implementations(), metadata={"static": True})

    @property
    def output_projection(self) -> Array:
        """W_O of each head, [N, D, M]."""
        _, N, _, D = self.queries.shape
        return self.config.part.rows_of(self.output_matrix).reshape(N, D, -1)

    @property
    def scale(self) -> float:
        """Factor on the logits of attention."""
        return self.config.scale

    @property
    def group(self) -> int:
        """G: query heads of each key-value head."""
        return self.config.num_attention_heads // self.config.num_key_value_heads

    def last_queries(self, count: int) -> tuple[Array, Array]:
        """Queries of each row's last ``count`` real tokens.

        Returns:
            Queries [B, N, count, D], and their positions int32 [B, count], which are negative for tokens that a row
            shorter than ``count`` doesn't have.
        """
        positions = self.lengths[:, None] - count + jnp.arange(count)
        index = jnp.maximum(positions, 0)[:, None, :, None]
        return jnp.take_along_axis(self.queries, index, axis=2), positions

    def window_scores(self, count: int, reduce: Callable, rivals: Callable | None = None) -> Any:
        """Statistics of the attention that each row's last ``count`` tokens pay to every entry.

        Args:
            count: Queries that look; static.
            reduce: What to make of their weights, see ``kvec_jax.scores.window_scores``.
            rivals: Likewise.

        Returns:
            As ``kvec_jax.scores.window_scores``.
        """
        queries, positions = self.last_queries(count)
        logsumexp = self.logsumexp
        if logsumexp is not None:
            logsumexp = jnp.take_along_axis(logsumexp, jnp.maximum(positions, 0)[:, None], axis=2)
        return self._scores(queries, positions, logsumexp, reduce, rivals)

    def block_scores(self, start: Array, positions: Array, reduce: Callable) -> Any:
        """``window_scores`` of the queries from ``start`` on, at ``positions`` [B, W]; negative ones do not look."""
        queries, logsumexp = (
            None if x is None else lax.dynamic_slice_in_dim(x, start, positions.shape[1], axis=2)
            for x in (self.queries, self.logsumexp)
        )
        return self._scores(queries, positions, logsumexp, reduce, None)

    def _scores(self, queries, positions, logsumexp, reduce, rivals):
        part = self.config.part
        if rivals is not None and part.heads > 1:  # the largest of each query over all heads, before queries are summed

            def both(weights, looks):
                return reduce(weights, looks), rivals(weights)

            found, each = self._scores(queries, positions, logsumexp, both, None)  # each [B, K, W, T]
            return found, jnp.sum(part.max(jnp.max(each, axis=1)), axis=1)
        return window_scores(
            queries,
            positions,
            self.keys,
            reduce,
            scale=self.scale,
            rivals=rivals,
            logsumexp=logsumexp,
            implementation=self.implementations.window_scores,
            interpret=bool(self.implementations.interpret),
        )

    def best(self, order: Array, k: Array) -> Array:
        """Marks the ``k`` best, see ``kvec_jax.select.top_k_mask``."""
        return self._best(order, k)

    def best_over_heads(self, order: Array, k: Array, rank: Array | None = None) -> Array:
        """Marks those of a device's entries, ``order`` [B, S], that are among the ``k`` [B] best of all devices'."""
        return self._best(order, k, rank, part=self.config.part)

    def _best(self, order, k, rank=None, **where):
        how = self.implementations
        return top_k_mask(order, k, rank, implementation=how.select_top_k, interpret=bool(how.interpret), **where)

    def sum_over_heads(self, x: Array) -> Array:
        """The sum [B, ...] of ``x`` [B, K, ...] over all key-value heads of the layer."""
        return self.config.part.sum(jnp.sum(x, axis=1))

    def all_heads(self, x: Array, axis: int = 1) -> Array:
        """What the layer's heads have on all devices, from ``x``, in which ``axis`` counts heads of this one."""
        return self.config.part.gather(x, axis)

    def own_heads(self, x: Array, axis: int = 1) -> Array:
        """What the heads of this device have, from ``x``, in which ``axis`` counts all heads of the layer."""
        return self.config.part.own(x, axis)

    def per_head(self, scores: Array) -> Array:
        """Gives the same scores [B, T] to every key-value head: [B, K, T]."""
        B, K, T, _ = self.keys.shape
        return jnp.broadcast_to(scores[:, None], (B, K, T))


class Scores(NamedTuple):
    """Scores of a layer from a scorer that says more than how much each entry matters.

    Attributes:
        final: float32 [B, K, T], what decides.
        base: float32 [B, K, T]: first the best by ``base`` are placed, as many as ``Scorer.forced`` says, then the
            rest by ``final``. Where heads compete, ``base`` divides the places among them. ``None``: one stage only.
        preference: float32 [B], how much the layer wants, for budget rules that ask; ``None`` if it doesn't say.
    """

    final: Array
    base: Array | None = None
    preference: Array | None = None


class Scorer(Protocol):
    """Says how much each entry of a layer matters. A frozen dataclass, so that it can be a static argument of ``jit``.

    Attributes:
        window: Tokens at the end of the prompt that are always kept.
    """

    window: int

    def prepare(self, model) -> Any:
        """What is computed from the weights once per model: a pytree with a leading layer axis, or ``None``."""

    def init(self, config: ModelConfig, batch: int, length: int) -> Any:
        """What is carried into the first layer: any pytree."""

    def score(self, seen: Observation, carry: Any) -> tuple[Array | Scores, Any]:
        """Scores float32 [B, K, T] (or ``Scores``) of one layer, and what is carried on."""

    def forced(self, budget: Array) -> Array:
        """Entries of a head with this ``budget`` (int32) that the base scores place, always kept ones included."""

    def after(self, kept: Array, carry: Any) -> Any:
        """What is carried on once it is known which entries ``kept`` bool [B, K, T] of all heads were chosen."""


@dataclasses.dataclass(frozen=True)
class Stateless:
    """Base of scorers that carry nothing from layer to layer; a subclass defines ``score``."""

    window: int = 0

    # Whether entries that were kept before can be scored again together with new ones: from keys, values and the
    # queries of the window alone, by their order and not by their positions.
    repeatable = False

    def prepare(self, model) -> None:
        """Nothing is prepared."""

    def init(self, config: ModelConfig, batch: int, length: int) -> None:
        """Nothing is carried."""

    def after(self, kept: Array, carry: None) -> None:
        """Nothing is carried."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What to keep of a prompt's cache: a scorer, who competes with whom, and for how many places.

    Any scorer goes with any scope and any budget; ``dataclasses.replace`` changes one of them.

    Args:
        scorer: How much each entry matters.
        budget: Tokens per key-value head, on average over those that compete: an int (window and sinks inside it), a
            float share of the prompt in (0, 1], or a budget rule such as ``Even`` or ``Pyramid``.
        scope: ``"head"``: each head keeps its own best; ``"layer"``: the heads of a layer compete for its places;
            ``"model"``: all heads of all layers compete for all places.
        sinks: Tokens at the beginning of the prompt that are always kept.
        floor: For ``"layer"``: share of the budget that every head gets whatever its scores, in [0, 1].
        name: What tables call it.

    Raises:
        TypeError, ValueError: For a budget, scope or number of sinks that makes no sense.

    Example:
        >>> import kvec_jax as kv
        >>> kv.Policy(scorer=kv.WindowAttention(window=16), budget=128, scope="layer").budget
        Even(tokens=128)
    """

    scorer: Scorer
    budget: BudgetRule | int | float
    scope: Scope = "head"
    sinks: int = 0
    floor: float = 0.0
    name: str = "policy"

    def __post_init__(self):
        if not hasattr(self.budget, "per_layer"):
            object.__setattr__(self, "budget", Even(self.budget))
        if isinstance(self.scorer, type) or not callable(getattr(self.scorer, "score", None)):
            raise TypeError(f"scorer: expected a scorer such as kvec_jax.WindowAttention(), got {self.scorer!r}")
        check_choice("scope", self.scope, ("head", "layer", "model"))
        check_count("sinks", self.sinks, 0)
        check_share("floor", self.floor)
        tokens, always = self.budget.tokens, self.scorer.window + self.sinks
        if isinstance(tokens, numbers.Integral) and tokens < always:
            raise ValueError(
                f"budget: expected at least {always} tokens (window {self.scorer.window} and sinks {self.sinks}, "
                f"which are always kept), got {tokens}"
            )

    def order(self, scores: Array, lengths: Array, forced: Array | None = None) -> Array:
        """Order of the entries, int32 [B, K, T], from scores [B, K, T]: always kept ones first, padding last.

        Where even those that are always kept don't all fit (a share of a short prompt), the newest come first, then the
        sinks. ``forced`` bool [B, K, T] entries come next.
        """
        at = jnp.arange(scores.shape[-1])
        age = lengths[:, None, None] - 1 - at  # 0 for the last token, negative for padding
        window = self.scorer.window
        order = ordered_keys(scores)
        if forced is not None:
            order = jnp.where(forced, _FORCED_KEY, order)
        order = jnp.where(at < self.sinks, FIRST_KEY - window - at, order)
        order = jnp.where(age < window, FIRST_KEY - age, order)
        return jnp.where(age < 0, LOWEST_KEY, order)


def newest_first(lengths: Array, shape: tuple[int, ...]) -> Array:
    """Order int32 ``shape`` [B, K, T] by age alone, padding last, above every score: what a local layer keeps."""
    age = lengths[:, None, None] - 1 - jnp.arange(shape[-1])
    return jnp.broadcast_to(jnp.where(age < 0, LOWEST_KEY, FIRST_KEY - age), shape)
