"""Spans: from surprisal, a partition, within their bounds, as the formulas say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax.sekv.plan import make_limits
from kvec_jax.sekv.policy import SeKV, read_everything
from kvec_jax.sekv.spans import segment, surprisals
from kvec_jax.testing import tiny_config
from tests.prompts import batch, model_of, prompt, trace_of
from tests.sekv import reference

LENGTHS, T = (300, 190, 37, 5, 1), 300


def limits_of(share, lengths=LENGTHS, T=T, **settings):
    sizes = dict(head_dim=64, groups=3, itemsize=2) | settings
    return make_limits(jnp.array(lengths), T, device_share=share, **sizes)


def surprisal_of(seed):
    drawn = np.random.default_rng(seed).exponential(size=(len(LENGTHS), T)).astype(np.float32)
    return jnp.asarray(drawn).at[:, 0].set(0)


def test_surprisal_is_that_of_the_models_own_logits():
    model, _ = model_of()
    tokens, lengths = batch((300, 37), T)
    got = jax.jit(lambda *inputs: surprisals(model, read_everything(*inputs)[0], inputs[1]))(model, tokens, lengths)
    for row, length in enumerate((300, 37)):
        want = reference.surprisals(trace_of(length).logits, prompt(length))
        np.testing.assert_allclose(got[row, :length], want, atol=1e-4)


@pytest.mark.parametrize("share, alpha", [(0.05, 1.0), (0.1, 1.0), (0.2, 0.0), (0.5, 2.5)])
def test_spans_are_those_of_the_formulas(share, alpha):
    surprisal, limits = surprisal_of(3), limits_of(share)
    spans = segment(surprisal, jnp.array(LENGTHS), limits, alpha)
    for row, length in enumerate(LENGTHS):
        want_exact, want = reference.segment(
            np.asarray(surprisal[row, :length], np.float64),
            *(int(x[row]) for x in (limits.window, limits.sinks, limits.anchors)),
            limits.min_span,
            limits.max_span,
            alpha,
        )
        assert np.flatnonzero(spans.exact[row]).tolist() == want_exact
        number = np.asarray(spans.span_of[row])
        got = [np.flatnonzero(number == i).tolist() for i in range(number.max() + 1)]
        assert got == want
        members = np.asarray(spans.members[row])
        assert [m[m < T].tolist() for m in members if (m < T).any()] == want
        assert spans.counts[row].tolist() == [len(s) for s in want] + [0] * (len(members) - len(want))


@pytest.mark.parametrize("seed", range(4))
def test_anchors_window_and_spans_partition_the_positions(seed):
    surprisal = surprisal_of(seed)
    limits = limits_of(0.1)
    spans = segment(surprisal, jnp.array(LENGTHS), limits)
    real = np.arange(T) < np.array(LENGTHS)[:, None]
    np.testing.assert_array_equal(np.asarray(spans.exact) ^ (np.asarray(spans.span_of) >= 0), real)
    assert not np.any(np.asarray(spans.exact) & ~real)
    assert np.all(np.asarray(spans.counts).sum(axis=1) + np.asarray(spans.exact).sum(axis=1) == np.array(LENGTHS))
    assert np.all(np.asarray(spans.exact).sum(axis=1) <= limits.max_exact)


def test_spans_without_surprise_have_the_longest_length():
    limits = limits_of(0.1)
    spans = segment(jnp.zeros((len(LENGTHS), T)), jnp.array(LENGTHS), limits)
    lengths = spans.counts[0][spans.counts[0] > 0]
    assert set(lengths[:-1].tolist()) == {limits.max_span}
    assert not np.any(spans.anchors)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("D, groups, itemsize", [(16, 4, 4), (64, 3, 2), (128, 8, 2)])
def test_parts_are_within_the_share_for_every_length(share, D, groups, itemsize):
    T = 4096
    lengths = jnp.arange(T + 1)
    limits = limits_of(share, lengths, T, head_dim=D, groups=groups, itemsize=itemsize)
    slot = int(limits.rank(limits.max_span, D, np)) * 2 * (limits.max_span + D) * itemsize
    exact = np.asarray(limits.window + limits.sinks + limits.anchors)
    row = 2 * D * itemsize
    spans = np.where(exact < np.arange(T + 1), np.arange(T + 1) // limits.min_span + 1, 0)
    taken = exact * row + spans * row + np.asarray(limits.slots) * slot
    enough = np.arange(T + 1) >= 8 / share
    assert np.all((taken <= share * np.arange(T + 1) * row)[enough])
    assert limits.max_exact == exact.max() and limits.max_slots == np.asarray(limits.slots).max()
    assert np.all(np.diff(exact) >= 0) and np.all(np.diff(spans[exact < np.arange(T + 1)]) >= 0)


def test_limits_of_a_row_do_not_depend_on_padding():
    for name in ("window", "sinks", "anchors", "slots"):
        alone, padded = (getattr(limits_of(0.1, LENGTHS, T), name) for T in (300, 1280))
        np.testing.assert_array_equal(alone, padded)


def test_segmentation_compiles_with_traced_lengths():
    def run(surprisal, lengths):
        limits = make_limits(lengths, T, device_share=0.1, head_dim=64, groups=3, itemsize=2)
        return segment(surprisal, lengths, limits)

    got = jax.jit(run)(surprisal_of(1), jnp.array(LENGTHS))
    want = run(surprisal_of(1), jnp.array(LENGTHS))
    np.testing.assert_array_equal(got.span_of, want.span_of)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(device_share=0), r"device_share: expected a share in \(0, 1\], got 0"),
        (dict(device_share=2), "device_share: expected a share"),
        (dict(rank_share="half"), "rank_share: expected a share"),
        (dict(min_span=0), "min_span: expected an integer, 1 or more, got 0"),
        (dict(max_span=8), "max_span: expected an integer, 16 or more, got 8"),
        (dict(sinks=-1), "sinks"),
        (dict(alpha="1"), "alpha: expected a number"),
        (dict(factors="disk"), "factors: expected None or 'host' or 'device', got 'disk'"),
        (dict(head=3), "head: expected a ZoomHead, a file or the name of a model, got 3"),
        (dict(head="no-such-model"), "no zoom-in head for 'no-such-model'.*kvec train-zoom --model no-such-model"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        SeKV(**settings)


def test_models_with_local_layers_are_refused():
    from kvec_jax.errors import UnsupportedError
    from kvec_jax.prefill import prefill
    from kvec_jax.testing import tiny_model

    assert tiny_config(sliding_window=8, local_layers=(0,)).local_layers
    with pytest.raises(UnsupportedError, match="local"):
        prefill(tiny_model(sliding_window=8, local_layers=(0,)), [[1, 2]], [2], SeKV())
