"""What is compared: policies by name and settings, each at several budgets."""

import dataclasses
from collections.abc import Sequence

from kvec_jax.forms import Form
from kvec_jax.policies import Policy
from kvec_jax.policies.options import make_policy, parse_setting
from kvec_jax.tiers.policy import Tiered

FULL, BASELINE = "full", "snapkv"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A policy with a budget, under the names that tables call them.

    Attributes:
        name: Of the policy, with its settings.
        budget: Tokens per key-value head, or a share of the prompt; ``None`` for the full cache.
        policy: What to keep.
    """

    name: str
    budget: int | float | None
    policy: Policy | Form | Tiered

    @property
    def label(self) -> str:
        """Policy and budget in one word.

        >>> import kvec_jax as kv
        >>> Trial("snapkv", 64, kv.SnapKV(64)).label
        'snapkv@64'
        """
        return self.name if self.budget is None else f"{self.name}@{self.budget}"


def make_trials(policies: Sequence[str], budgets: Sequence[int | float], model: str) -> list[Trial]:
    """All policies at all budgets.

    Args:
        policies: Names, each with settings of its own after colons, such as ``"kvec:window=8:scope=model"``.
        budgets: Tokens per key-value head, or shares of the prompt.
        model: Whose calibration is taken where a policy needs one.

    Raises:
        ValueError: For an unknown policy, or a setting or budget that it can't have.

    Example:
        >>> [trial.label for trial in make_trials(["full", "kvec:kernel=5"], [64, 128], "smollm2-135m")]
        ['full', 'kvec:kernel=5@64', 'kvec:kernel=5@128']
    """
    trials = []
    for spec in dict.fromkeys(policies):
        name, *settings = spec.split(":")
        settings = [parse_setting(setting) for setting in settings]
        own = [None] if name == FULL else dict.fromkeys(budgets)
        for budget in own:
            policy = make_policy(name, budget, settings, model=model)
            if not isinstance(policy, Policy | Form | Tiered):
                raise ValueError(f"policy {name!r} can't be evaluated: no program reads and answers with its cache")
            trials.append(Trial(spec, budget, policy))
    return trials
