"""What scorers compute from a model's weights: once per model, kept as long as the model lives."""

import functools
import weakref
from typing import Any

import jax

from kvec_jax.forms import Form
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies.base import Policy, Scorer
from kvec_jax.spread import on_mesh

_KEPT: weakref.WeakKeyDictionary[Transformer, dict] = weakref.WeakKeyDictionary()


def prepare(policy: Policy | Form, model: Transformer) -> Any:
    """What the policy's scorer prepares of the model: a pytree with a leading layer axis, or ``None``."""
    if isinstance(policy, Form):
        return policy.prepare(model)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model)):
        return _prepare(policy.scorer, model)  # part of the caller's program
    kept = _KEPT.setdefault(model, {})
    if policy.scorer not in kept:
        kept[policy.scorer] = _prepare(policy.scorer, model)
    return kept[policy.scorer]


def _prepare(scorer: Scorer, model: Transformer) -> Any:
    return scorer.prepare(model) if model.mesh is None else _prepare_parts(model, scorer)["prepared"]


@functools.partial(jax.jit, static_argnames="scorer")
@on_mesh
def _prepare_parts(model, scorer):
    return {"prepared": scorer.prepare(model)}
