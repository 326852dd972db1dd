"""What a user asks for so that a cache takes less memory, beside the policy."""

import dataclasses
import numbers

from kvec_jax.arguments import check_choice, check_count
from kvec_jax.errors import UnsupportedError
from kvec_jax.models.config import ModelConfig
from kvec_jax.policies.base import Policy
from kvec_jax.quantised import CACHE_DTYPES
from kvec_jax.rolling import check_rolling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Static settings of a program; ``None`` means no limit.

    Attributes:
        chunk: Tokens of a prompt that are read at a time.
        tail: Tokens after which the policy chooses again, while a text is generated.
        cache_dtype: ``"int8"`` or ``"int4"``, how kept rows are stored.
    """

    chunk: int | None = None
    tail: int | None = None
    cache_dtype: str | None = None


def check_limits(policy: Policy, config: ModelConfig, **limits) -> Limits:
    """The ``Limits``; raises what the user should know where they can't be kept."""
    limits = Limits(**limits)
    if limits.cache_dtype is not None:
        check_choice("cache_dtype", limits.cache_dtype, CACHE_DTYPES)
        if not isinstance(policy, Policy):
            raise UnsupportedError(f"cache_dtype: only for policies that choose rows, not for {policy!r}")
    for name in ("chunk", "tail"):
        tokens = getattr(limits, name)
        if tokens is not None:
            check_count(name, tokens, 1)
            check_rolling(policy, config, name, tokens)
    if limits.tail is not None:
        budget = policy.budget.tokens
        if not isinstance(budget, numbers.Integral):
            raise ValueError(f"tail: expected a budget in tokens, which keeps its size, got {budget!r} of the prompt")
        if limits.cache_dtype is not None:
            raise UnsupportedError("tail: not with cache_dtype; rows in fewer bits can't be chosen from again")
    return limits
