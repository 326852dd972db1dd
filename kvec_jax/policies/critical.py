"""CriticalKV: half by attention, half by attention times the size of what a value adds to the output."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_number, check_share
from kvec_jax.policies.base import Observation, Policy, Scorer, Scores
from kvec_jax.policies.snapkv import WindowAttention
from kvec_jax.typing import Array

# Tokens whose projected values are in memory at a time.
_TOKEN_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class OutputAware:
    """Another scorer's scores, in a second stage times the L1 norm of v W_O."""

    base: Scorer = WindowAttention()
    first_share: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self):
        check_share("first_share", self.first_share)
        check_number("epsilon", self.epsilon, 0)

    @property
    def window(self) -> int:
        """The base scorer's."""
        return self.base.window

    def prepare(self, model) -> Any:
        """The base scorer's."""
        return self.base.prepare(model)

    def init(self, config, batch: int, length: int) -> Any:
        """The base scorer's."""
        return self.base.init(config, batch, length)

    def score(self, seen: Observation, carry: Any) -> tuple[Scores, Any]:
        """The base scores, and (base + epsilon) * norm."""
        base, carry = self.base.score(seen, carry)
        if isinstance(base, Scores):
            base = base.final
        return Scores(final=(base + self.epsilon) * output_l1_norms(seen), base=base), carry

    def forced(self, budget: Array) -> Array:
        """``first_share`` of the budget, the window inside it."""
        return jnp.floor(self.first_share * budget.astype(jnp.float32)).astype(jnp.int32)

    def after(self, kept: Array, carry: Any) -> Any:
        """The base scorer's."""
        return self.base.after(kept, carry)


def output_l1_norms(seen: Observation) -> Array:
    """L1 norm of v W_O of every entry, mean over its group's query heads: float32 [B, K, T]; a block at a time."""
    B, K, T, D = seen.values.shape
    block = min(_TOKEN_BLOCK, T)
    blocks = -(-T // block)
    values = jnp.pad(seen.values, [(0, 0), (0, 0), (0, blocks * block - T), (0, 0)])
    heads = seen.output_projection.reshape(K, -1, D, seen.output_projection.shape[-1])

    def norms(i):
        part = lax.dynamic_slice_in_dim(values, i * block, block, axis=2)
        outputs = jnp.einsum("BKTD,KGDM->BKGTM", part, heads, preferred_element_type=jnp.float32)
        return jnp.mean(jnp.sum(jnp.abs(outputs), axis=-1), axis=2)

    parts = lax.map(norms, jnp.arange(blocks))  # [blocks, B, K, block]
    return jnp.moveaxis(parts, 0, 2).reshape(B, K, -1)[:, :, :T]


def CriticalKV(budget: Any, *, scorer: Scorer | None = None, first_share: float = 0.5, epsilon: float = 1e-4) -> Policy:
    """Half of the budget by attention, the rest by attention times ||v W_O||_1, https://arxiv.org/abs/2502.03805.

    Args:
        budget: See ``Policy``.
        scorer: The attention scores; SnapKV's by default.
        first_share: Share of the budget, the window inside it, that the first stage places.
        epsilon: Added to the scores of the second stage before they are multiplied.
    """
    critical = OutputAware(scorer or WindowAttention(), first_share, epsilon)
    return Policy(scorer=critical, budget=budget, name="criticalkv")


def CriticalAdaKV(
    budget: Any,
    *,
    scorer: Scorer | None = None,
    first_share: float = 0.5,
    epsilon: float = 1e-4,
    floor: float = 0.2,
) -> Policy:
    """``CriticalKV`` with ``AdaKV``'s budgets of the heads, which come from the attention scores.

    Args:
        budget: See ``Policy``; the average over a layer's heads.
        scorer: The attention scores; SnapKV's by default.
        first_share: See ``CriticalKV``.
        epsilon: See ``CriticalKV``.
        floor: See ``AdaKV``.
    """
    critical = OutputAware(scorer or WindowAttention(), first_share, epsilon)
    return Policy(scorer=critical, budget=budget, scope="layer", floor=floor, name="criticaladakv")
