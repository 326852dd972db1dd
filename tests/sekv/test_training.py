"""Training: the student is SeKV, every trained number gets a right gradient, and an interruption leaves no trace."""

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvec_jax as kv
from kvec_jax.sekv import training as module
from kvec_jax.sekv.head import HeadConfig, ZoomHead, load_head, values_of, with_values
from kvec_jax.sekv.lesson import make_lesson
from kvec_jax.sekv.losses import Weights, divergence, losses
from kvec_jax.sekv.policy import SeKV
from kvec_jax.sekv.student import answer
from kvec_jax.sekv.training import HEAD_FILE, Training, train
from kvec_jax.sekv.windows import Windows
from kvec_jax.testing import tiny_model
from tests.sekv.open import EVERYTHING, Sized

CHANGES = dict(num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
POLICY = SeKV(0.6, min_span=8, max_span=16, max_rank=4, rank_share=0.5)
TOKENS = np.random.default_rng(0).integers(1, 63, size=(2, 136)).astype(np.int32)
QUERIES = 8


# As many places as spans: nothing but a decision changes what is read.
ROOMY = Sized(0.6, min_span=8, max_span=16, max_rank=4, rank_share=0.5, full_rank=False, slots=EVERYTHING)


@functools.cache
def setting(policy=POLICY):
    model = tiny_model(**CHANGES)
    head = ZoomHead(HeadConfig.of(model.config, typical_span=8, hidden=8, max_rank=4), rngs=nnx.Rngs(3))
    make = jax.jit(make_lesson, static_argnums=(2, 3))
    return model, head, make(model, jnp.asarray(TOKENS), QUERIES, policy)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_the_student_is_the_policy(trained):
    model, head, lesson = setting()
    head = head if trained else None
    got, notes = jax.jit(answer)(model, head, lesson)
    policy = dataclasses.replace(POLICY, head=head)
    T = TOKENS.shape[1] - QUERIES
    _, cache = kv.prefill(model, TOKENS[:, :T], [T, T], policy, reserve=QUERIES)
    want, after = kv.extend(model, cache, TOKENS[:, T:], all_logits=True)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.all(np.asarray(after.beyond.fetched) > 0)  # some spans are open
    assert np.isfinite(notes.zoom)


def test_the_teacher_is_full_attention():
    model, _, lesson = setting()
    want, _ = kv.prefill(model, TOKENS, [136, 136], kv.FullCache(), all_logits=True)
    np.testing.assert_allclose(lesson.teacher, want[:, -QUERIES:], atol=1e-4)
    assert float(divergence(lesson.teacher, lesson.teacher)) == 0


@jax.jit
def _objective(values, model, head, lesson, weights):
    def total(values):
        return losses(model, with_values(head, values), lesson, jnp.float32(1), Weights(**weights)).total

    return jax.value_and_grad(total)(values)


def objective(values, policy=POLICY, **changes):
    """The weighted losses of a head with these values, and their gradient."""
    model, head, lesson = setting(policy)
    weights = dict(zoom=1.0, recon=0.5, budget=0.5, gates=0.1) | changes
    return _objective(values, model, head, lesson, jax.tree.map(jnp.float32, weights))


def values_at(threshold: float):
    head = setting()[1]
    return values_of(head) | {"threshold": jnp.full_like(head.threshold[...], threshold)}


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [-50.0, 50.0])
def test_gradients_are_those_of_finite_differences(threshold):
    """Decisions have no slope: what goes past them is checked with all spans open that may be, and with all closed."""
    values = values_at(threshold)
    _, gradient = objective(values, ROOMY)
    rng = np.random.default_rng(1)
    for name in values:
        direction = jnp.asarray(rng.normal(size=values[name].shape).astype(np.float32))
        direction /= jnp.linalg.norm(direction)
        step = 3e-2
        ahead, behind = (
            float(objective(values | {name: values[name] + s * direction}, ROOMY)[0]) for s in (step, -step)
        )
        slope = float(jnp.sum(gradient[name] * direction))
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=0.05, atol=1e-3, err_msg=name)


@pytest.mark.slow
def test_every_trained_number_receives_a_gradient():
    _, gradient = objective(values_of(setting()[1]))
    for name, value in gradient.items():
        assert np.mean(np.asarray(value) != 0) > 0.99, name


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.0, 3.0])
def test_a_decision_has_slopes_on_both_sides(threshold):
    """Closed spans whose reading would help are drawn open, and open ones drawn closed."""
    _, gradient = objective(values_at(threshold), zoom=0.0, recon=0.0, budget=0.0)
    assert np.all(np.asarray(gradient["threshold"]) != 0)


def windows():
    text = np.random.default_rng(5).integers(1, 63, size=4000)
    return Windows([text, text[::-1]], ["one", "two"])


TRAINING = Training(
    steps=6, lengths=(136, 144), queries=QUERIES, policy=POLICY, every=2, validation=2, learning_rate=3e-3
)


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[1:]]
    return dict(lines)


@pytest.mark.slow
def test_an_interrupted_training_goes_on_exactly(tmp_path):
    model = tiny_model(**CHANGES)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(model)]
    _, about = train(model, windows(), tmp_path / "whole", TRAINING)
    for mine, leaf in zip(before, jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(mine, leaf)  # the model learns nothing

    def stop(step, _):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, windows(), tmp_path / "cut", TRAINING, progress=stop)
    assert not (tmp_path / "cut" / HEAD_FILE).exists()
    head, again = train(model, windows(), tmp_path / "cut", TRAINING)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert again["validation_kl"] == about["validation_kl"]
    assert again["steps"] == about["steps"]
    loaded, told = load_head(tmp_path / "cut" / HEAD_FILE)
    assert told["validation_kl"] == again["validation_kl"]
    for mine, theirs in zip(values_of(head).values(), values_of(loaded).values(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-3)
    kept = sorted(int(p.name) for p in (tmp_path / "cut" / "checkpoints").iterdir() if p.name.isdigit())
    assert kept == sorted({again["steps"], 6})
    with pytest.raises(ValueError, match="metrics.jsonl: begun with other settings"):
        train(model, windows(), tmp_path / "cut", dataclasses.replace(TRAINING, seed=1))


@pytest.mark.slow
def test_training_lowers_the_loss(tmp_path):
    model = tiny_model(**CHANGES)
    settings = dataclasses.replace(TRAINING, steps=30, every=30, lengths=(136,), learning_rate=1e-2)
    train(model, windows(), tmp_path, settings)
    found = metrics(tmp_path)
    zoom = [found[f"step {i}"]["zoom"] for i in range(1, 31)]
    assert np.mean(zoom[-5:]) < np.mean(zoom[:5])


def test_windows_keep_what_is_held_out_apart():
    text = np.arange(1000)
    made = Windows([text], ["counting"])
    assert made.held_out(3, 50)[:, 0].tolist() == [900, 925, 950]
    rows = np.concatenate([made.batch(0, step, 4, 100) for step in range(50)])
    assert rows.max() < 900 and np.all(np.diff(rows, axis=1) == 1)
    np.testing.assert_array_equal(made.batch(0, 7, 4, 100), made.batch(0, 7, 4, 100))
    assert not np.array_equal(made.batch(0, 7, 4, 100), made.batch(0, 8, 4, 100))
    with pytest.raises(ValueError, match="at least 901 tokens, without its last tenth; the longest has 900"):
        made.batch(0, 0, 1, 901)
    with pytest.raises(ValueError, match="expected 101 tokens in the last tenth, which is held out, got 100"):
        made.held_out(1, 101)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(steps=0), "steps: expected an integer, 1 or more"),
        (dict(queries=600), "queries: expected at most 512, got 600"),
        (dict(lengths=()), "lengths: expected at least one"),
        (dict(lengths=(100,)), "lengths: expected an integer, 192 or more, got 100"),
    ],
)
def test_settings_of_a_training_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Training(**settings)


# On CPU a decomposition waits for threads of the pool that it runs in; those of two devices need more than two.
_TWO_DEVICES = """
import os
os.environ["NPROC"] = "8"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
import dataclasses, json, sys
import jax
from kvec_jax.sekv.training import train
from kvec_jax.testing import tiny_model
from tests.sekv import test_training as here
settings = dataclasses.replace(here.TRAINING, batch=2, steps=2, lengths=(136,), every=1)
def train_with(name, mesh, progress=lambda *_: None):
    train(tiny_model(**here.CHANGES), here.windows(), f"{sys.argv[1]}/{name}", settings, mesh=mesh, progress=progress)
def stop(*_):
    raise KeyboardInterrupt
train_with("one", None)
mesh = jax.make_mesh((2,), ("data",))
try:
    train_with("two", mesh, stop)
except KeyboardInterrupt:
    train_with("two", mesh)
"""


@pytest.mark.slow
def test_devices_share_a_batch(tmp_path):
    subprocess.run([sys.executable, "-c", _TWO_DEVICES, tmp_path], check=True)
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for name in one:
        np.testing.assert_allclose(list(one[name].values()), list(two[name].values()), rtol=1e-3)


def test_a_batch_must_be_shareable():
    assert module._as_mesh(jax.make_mesh((1, 1), ("data", "model")), 3).axis_names == ("data",)
    with pytest.raises(ValueError, match="batch: expected a multiple of 2, the devices that share it, got 3"):
        module._as_mesh(type("Mesh", (), {"axis_names": ("data",), "shape": {"data": 2}}), 3)
