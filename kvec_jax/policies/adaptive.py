"""Methods that divide a budget unevenly: Ada-KV over the heads of a layer, PyramidKV over the layers."""

from typing import Any, Literal

from kvec_jax.policies.base import Policy, Scorer
from kvec_jax.policies.budgets import Pyramid
from kvec_jax.policies.snapkv import WindowAttention


def AdaKV(budget: Any, *, scorer: Scorer | None = None, floor: float = 0.2) -> Policy:
    """The heads of a layer compete for its places, https://arxiv.org/abs/2407.11550 (algorithm 2).

    A head's budget is (1 - floor) times the number of its entries among the layer's best, plus ``floor`` times the even
    share, as in the official code (the printed algorithm has the two the other way round); rounded so that the layer's
    sum is exact (largest remainder). Each head then keeps its own best.

    Args:
        budget: See ``Policy``; the average over a layer's heads.
        scorer: How much each entry matters; SnapKV's by default.
        floor: Share of the budget that every head gets.

    Example:
        >>> AdaKV(128).scope
        'layer'
    """
    return Policy(scorer=scorer or WindowAttention(), budget=budget, scope="layer", floor=floor, name="adakv")


def PyramidKV(
    budget: int | float,
    *,
    window: int = 32,
    kernel: int = 7,
    pooling: Literal["max", "avg"] = "max",
    beta: int = 20,
) -> Policy:
    """SnapKV with budgets that fall from the first layer to the last, https://arxiv.org/abs/2406.02069.

    Args:
        budget: Tokens per key-value head on average, or a share of the prompt; see ``Pyramid``.
        window: Queries that look.
        kernel: Neighbours that are pooled.
        pooling: ``"max"`` or ``"avg"``.
        beta: How steep.

    Example:
        >>> PyramidKV(128).budget
        Pyramid(tokens=128, window=32, beta=20)
    """
    rule = Pyramid(tokens=budget, window=window, beta=beta)
    return Policy(scorer=WindowAttention(window, kernel, pooling), budget=rule, name="pyramidkv")
