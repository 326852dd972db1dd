"""Policies as a command line names them: by name, budget, and settings of their own."""

import argparse
import ast
import dataclasses
import inspect
import re
from collections.abc import Sequence

from kvec_jax.policies.base import Policy
from kvec_jax.policies.registry import get

DEFAULT_BUDGET = 256
# Settings that a command line can't name.
_OBJECTS = ("scorer", "policy", "progress")


def parse_budget(text: str) -> int | float:
    """The budget that ``text`` stands for: tokens per head, or a share of the prompt.

    >>> parse_budget("256"), parse_budget("0.25")
    (256, 0.25)

    Raises:
        argparse.ArgumentTypeError: ``text`` is not a number. The range is the policy's to check.
    """
    text = text.strip()
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number of tokens such as 256 or a share such as 0.25, got {text!r}"
        ) from None


def parse_setting(text: str) -> tuple[str, object]:
    """Key and value of ``key=value``, the value read as Python where it is a number or the like.

    >>> parse_setting("window=16"), parse_setting("pooling=avg"), parse_setting("covariance=false")
    (('window', 16), ('pooling', 'avg'), ('covariance', False))

    Raises:
        argparse.ArgumentTypeError: There is no ``=``.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE such as window=16, got {text!r}")
    try:
        return key, ast.literal_eval(value.capitalize() if value.lower() in ("true", "false", "none") else value)
    except (ValueError, SyntaxError):
        return key, value


def make_policy(
    name: str,
    budget: int | float | None = None,
    settings: Sequence[tuple[str, object]] = (),
    model: str | None = None,
):
    """The policy called ``name``, with ``budget`` where it takes one, and further ``settings`` of its own.

    A policy that needs a calibration gets that of ``model``, unless another is among the settings. ``scope`` is a
    setting of all policies that choose rows.

    Raises:
        ValueError: No policy has that name, or this one doesn't take what it was given, or needs more.
    """
    factory = get(name)
    takes = {key: value for key, value in inspect.signature(factory).parameters.items() if key not in _OBJECTS}
    given = dict(settings)
    if "budget" in takes:
        given["budget"] = DEFAULT_BUDGET if budget is None else budget
    elif budget is not None:
        raise ValueError(f"policy {name!r} keeps everything and takes no --budget; name another with --policy")
    scope = None if "scope" in takes or name == "full" else given.pop("scope", None)
    for key in given:
        if key not in takes:
            known = ", ".join(key for key in takes if key != "budget") or "none"
            raise ValueError(f"policy {name!r} has no setting {key!r}; it has: {known}")
    if "calibration" in takes and model is not None:
        given.setdefault("calibration", model)
    for key, parameter in takes.items():
        if key not in given and parameter.default is inspect.Parameter.empty:
            raise ValueError(f"policy {name!r} needs --set {key}=...")
    try:
        policy = factory(**given)
        if scope is None:
            return policy
        if not isinstance(policy, Policy):
            raise ValueError(f"policy {name!r} chooses no rows and has no setting 'scope'")
        return dataclasses.replace(policy, scope=scope)
    except TypeError as error:  # a value of the wrong type; the message names it
        raise ValueError(str(error)) from error
