"""What a policy refuses, and how it says so."""

import numpy as np
import pytest

import kvec_jax as kv


@pytest.mark.parametrize("make", [kv.SnapKV, kv.StreamingLLM], ids=["snapkv", "streaming"])
@pytest.mark.parametrize(
    "budget, message",
    [
        (0, "budget: expected at least 1 token per key-value head, got 0"),
        (-1, "budget: expected at least 1 token per key-value head, got -1"),
        (0.0, r"budget: expected a share of the prompt in \(0, 1\].* got 0.0"),
        (1.5, r"budget: expected a share of the prompt in \(0, 1\].* got 1.5"),
        (-0.5, r"budget: expected a share of the prompt in \(0, 1\].* got -0.5"),
        (float("nan"), r"budget: expected a share of the prompt in \(0, 1\]"),
        ("x", "budget: expected tokens per key-value head .* got 'x'"),
        (None, "budget: expected tokens per key-value head .* got None"),
        (True, "budget: expected tokens per key-value head .* got True"),
        (np.bool_(True), "budget: expected tokens per key-value head"),
        ([64], "budget: expected tokens per key-value head"),
    ],
    ids=repr,
)
def test_budgets(make, budget, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(budget)


@pytest.mark.parametrize("budget", [64, np.int32(64), np.int64(64), 0.25, np.float32(0.25), 1.0])
def test_budgets_of_any_number_type(budget):
    assert kv.SnapKV(budget).budget.tokens == budget
    assert hash(kv.SnapKV(budget)) == hash(kv.SnapKV(budget))


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(window=0), "window: expected .* got 0"),
        (dict(window=-3), "window: expected .* got -3"),
        (dict(window=8.0), "window: expected .* got 8.0"),
        (dict(window=True), "window: expected .* got True"),
        (dict(kernel=4), "kernel: expected .* got 4"),
        (dict(kernel=0), "kernel: expected .* got 0"),
        (dict(kernel=-1), "kernel: expected .* got -1"),
        (dict(pooling="mean"), "pooling: expected 'max' or 'avg', got 'mean'"),
        (dict(window=65), "budget: expected at least 65 tokens .*always kept.* got 64"),
    ],
    ids=repr,
)
def test_snapkv(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kv.SnapKV(64, **settings)


@pytest.mark.parametrize(
    "sinks, message",
    [
        (-1, "sinks: expected .* got -1"),
        (2.0, "sinks: expected .* got 2.0"),
        (65, "budget: expected at least 65 tokens"),
    ],
)
def test_streaming(sinks, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kv.StreamingLLM(64, sinks=sinks)


@pytest.mark.parametrize(
    "factory, setting, value, message",
    [
        (kv.ExpectedAttention, "covariance", "false", "expected True or False"),
        (kv.ExpectedAttention, "value_norm", 1, "expected True or False"),
        (kv.ExpectedAttention, "epsilon", -0.1, "expected a number, 0 or more"),
        (kv.LaProx, "normalize", "no", "expected True or False"),
        (kv.ObservedAttention, "per_query", None, "expected True or False"),
        (kv.CAKE, "gamma", "x", "expected a number, 0 or more"),
        (kv.CAKE, "tau1", 0, "expected a number above 0"),
        (kv.CAKE, "tau2", float("nan"), "expected a number above 0"),
        (kv.KVec, "forced_share", "half", r"expected a share in \[0, 1\]"),
        (kv.KVec, "novelty_weight", True, "expected a number, 0 or more"),
        (kv.CriticalKV, "first_share", 1.5, r"expected a share in \[0, 1\]"),
        (kv.CriticalKV, "epsilon", None, "expected a number, 0 or more"),
        (kv.AdaKV, "floor", "x", r"expected a share in \[0, 1\]"),
        (kv.Random, "seed", "x", "expected an integer, 0 or more"),
    ],
)
def test_other_settings(factory, setting, value, message):
    with pytest.raises((TypeError, ValueError), match=f"{setting}: {message}, got {value!r}"):
        factory(64, **{setting: value})


@pytest.mark.parametrize("scope", ["row", None, 1])
def test_scopes(scope):
    with pytest.raises(ValueError, match="scope: expected 'head'"):
        kv.Policy(scorer=kv.WindowAttention(), budget=64, scope=scope)


@pytest.mark.parametrize("scorer", ["snapkv", None, kv.WindowAttention])
def test_scorers(scorer):
    with pytest.raises(TypeError, match="scorer: expected"):
        kv.Policy(scorer=scorer, budget=64)


def test_policies_are_values():
    assert kv.SnapKV(64) == kv.SnapKV(64) != kv.SnapKV(65)
    assert len({kv.SnapKV(64), kv.SnapKV(64), kv.StreamingLLM(64)}) == 2
