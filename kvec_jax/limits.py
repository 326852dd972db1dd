"""What a user asks for so that a cache takes less memory or fewer positions, beside the policy."""

import dataclasses
import numbers
from typing import Any

from kvec_jax.arguments import check_choice, check_count, check_flag
from kvec_jax.errors import UnsupportedError
from kvec_jax.models.config import ModelConfig
from kvec_jax.policies.base import Policy
from kvec_jax.quantised import CACHE_DTYPES
from kvec_jax.rolling import check_even, check_rolling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Static settings of a program; ``None`` means no limit.

    Attributes:
        chunk: Tokens of a prompt that are read at a time.
        tail: Tokens after which the policy chooses again, while a text is generated.
        cache_dtype: ``"int8"`` or ``"int4"``, how kept rows are stored.
        rerotate: Whether kept entries are turned to the positions 0, 1, 2, ...
    """

    chunk: int | None = None
    tail: int | None = None
    cache_dtype: str | None = None
    rerotate: bool = False

    def positions(self, policy: Policy, config: ModelConfig, length: int, new: int) -> int:
        """Positions that the model needs to read ``length`` tokens and to write ``new`` ones (the last isn't read)."""
        new = max(new - 1, 0)
        if not self.rerotate:
            return length + new
        kept = policy.budget.most(length, config.num_hidden_layers)
        reading = length if self.chunk is None else min(length, kept + self.chunk)
        writing = kept + new if self.tail is None else min(kept + new, policy.budget.tokens + self.tail)
        return max(reading, writing)


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
    check_flag("rerotate", limits.rerotate)
    if limits.rerotate:
        check_even(policy, config, "rerotate")
    if limits.tail is not None:
        budget = policy.budget.tokens
        if not isinstance(budget, numbers.Integral):
            raise ValueError(f"tail: expected a budget in tokens, which keeps its size, got {budget!r} of the prompt")
        if limits.cache_dtype is not None:
            raise UnsupportedError("tail: not with cache_dtype; rows in fewer bits can't be chosen from again")
    return limits


def check_positions(name: str, limits: Limits, policy: Any, config: ModelConfig, length: int, new: int = 0) -> None:
    """Raises a ``ValueError`` that begins with ``name`` where a text needs more positions than the model has."""
    context, needed = config.max_position_embeddings, limits.positions(policy, config, length, new)
    if needed <= context:
        return
    what = f"{length} tokens and {new} new ones" if new else f"{length} tokens"
    if limits.rerotate:
        kept = policy.budget.most(length, config.num_hidden_layers)
        how = f"{kept} are kept, beside which a chunk of the prompt and what is written (tail) must fit"
    else:
        how = "a policy such as SnapKV(256) reads longer texts with chunk and rerotate"
    raise ValueError(f"{name}: {what} take {needed} positions, more than the model's context of {context}; {how}")
