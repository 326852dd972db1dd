"""What scorers compute from a model's weights: once per model, kept as long as the model lives."""

import weakref
from typing import Any

import jax

from kvec_jax.forms import Form
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies.base import Policy

_KEPT: weakref.WeakKeyDictionary[Transformer, dict] = weakref.WeakKeyDictionary()


def prepare(policy: Policy | Form, model: Transformer) -> Any:
    """What the policy's scorer prepares of the model: a pytree with a leading layer axis, or ``None``."""
    if isinstance(policy, Form):
        return policy.prepare(model)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model)):
        return policy.scorer.prepare(model)  # part of the caller's program
    kept = _KEPT.setdefault(model, {})
    if policy.scorer not in kept:
        kept[policy.scorer] = policy.scorer.prepare(model)
    return kept[policy.scorer]
