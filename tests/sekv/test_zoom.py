"""Attention over spans: exact where everything is open, and between coarse and fine as the formulas say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvec_jax as kv
from kvec_jax.online_softmax import finish
from kvec_jax.sekv.build import build_memory, span_weights
from kvec_jax.sekv.factors import factorize
from kvec_jax.sekv.head import HeadConfig, ZoomHead, load_head, route_norms, route_scores, save_head, with_values
from kvec_jax.sekv.lesson import make_lesson
from kvec_jax.sekv.policy import SeKV
from kvec_jax.sekv.spans import segment
from kvec_jax.shipped import known_name, shipped_folder
from kvec_jax.testing import tiny_config
from tests.oracle.forward import forward
from tests.prompts import batch, model_of, prompt
from tests.sekv import reference
from tests.sekv.open import EVERYTHING, Sized

LENGTHS, T = (150, 37, 5), 160
OPEN = Sized(min_span=8, max_span=20, slots=EVERYTHING)
TWO = dataclasses.replace(OPEN, slots=2, full_rank=False)
NEW = np.random.default_rng(9).integers(1, 255, size=(3, 6)).astype(np.int32)


@functools.cache
def prefilled(policy, reserve=16):
    return kv.prefill(model_of()[0], *batch(LENGTHS, T), policy, reserve=reserve)


def add(cache, tokens):
    """One token to each row; the padding beside it leaves no trace."""
    part = np.stack([tokens, np.full(3, 250)], axis=1)
    return kv.extend(model_of()[0], cache, part, jnp.array([1, 1, 1]))


def test_all_spans_open_at_full_rank_are_full_attention():
    model, w = model_of()
    logits, cache = prefilled(OPEN)
    after, _ = kv.extend(model, cache, NEW, all_logits=True)
    for row, length in enumerate(LENGTHS):
        tokens = [*prompt(length), *NEW[row].tolist()]
        everything = [[np.arange(length)] * 2] * 4
        want = forward(model.config, w, tokens, everything, length).logits
        np.testing.assert_allclose(logits[row], want[length - 1], atol=1e-4)
        np.testing.assert_allclose(after[row], want[length:], atol=1e-4)


@pytest.mark.parametrize(
    "policy", [pytest.param(TWO, id="two"), pytest.param(SeKV(0.2), id="share", marks=pytest.mark.slow)]
)
def test_portions_of_any_size(policy):
    model, _ = model_of()
    _, cache = prefilled(policy)
    at_once, whole = kv.extend(model, cache, NEW, all_logits=True)
    steps = []
    for i in range(NEW.shape[1]):
        logits, cache = add(cache, NEW[:, i])
        steps.append(logits)
    np.testing.assert_allclose(np.stack(steps, axis=1), at_once, atol=1e-5)
    if policy.name == "sekv" and cache.beyond.slots.shape[3]:
        np.testing.assert_array_equal(cache.beyond.fetched, whole.beyond.fetched)
        np.testing.assert_array_equal(cache.beyond.slot_spans, whole.beyond.slot_spans)


@pytest.mark.slow
def test_rows_of_a_batch_are_as_alone():
    model, _ = model_of()
    policy = SeKV(0.3, min_span=8)
    tokens, lengths = batch(LENGTHS, T)
    want = kv.generate(model, tokens, lengths, policy, max_new_tokens=12, eos_token_ids=())
    for row, length in enumerate(LENGTHS):
        alone = tokens[row : row + 1, : max(LENGTHS)]  # with less padding than in the batch
        alone = kv.generate(model, alone, [length], policy, max_new_tokens=12, eos_token_ids=())
        np.testing.assert_array_equal(alone[0], want[row])


def test_generated_tokens_enter_the_cache():
    _, cache = prefilled(TWO)
    first, second = (add(cache, [token] * 3)[1] for token in (7, 8))
    a, b = (add(c, [9] * 3)[0] for c in (first, second))
    assert np.all(np.max(np.abs(a - b), axis=-1) > 1e-3)


@pytest.mark.parametrize("head", [None, "trained"])
def test_one_layer_is_what_the_formulas_say(head):
    """Attention of one query over a memory, some spans open, against numpy."""
    rng = np.random.default_rng(4)
    config = tiny_config()
    L, K, G, D, length = 2, 2, 4, 16, 150
    keys, values = (rng.normal(size=(L, 1, K, 160, D)).astype(np.float32) for _ in range(2))
    surprisal = jnp.asarray(rng.exponential(size=(1, 160)).astype(np.float32))
    lengths = jnp.array([length])
    policy = dataclasses.replace(OPEN, slots=3)
    zoom = None
    if head:
        zoom = ZoomHead(
            HeadConfig.of(dataclasses.replace(config, num_hidden_layers=L), typical_span=12), rngs=nnx.Rngs(3)
        )
        zoom = with_values(zoom, dict(nnx_values(zoom), gate_out_bias=jnp.full(32, 1e4)))  # gates open

    @jax.jit
    def make(keys, values):
        limits = policy.limits(config, lengths, 160, 4)
        spans = segment(surprisal, lengths, limits)
        return spans, build_memory(keys, values, surprisal, spans, limits, zoom, False)

    @jax.jit
    def attend(memory):
        partial, after = memory.attend(queries, jnp.int32(1), jnp.ones((1, 1), bool), 0.25)
        return finish(partial)[0], after

    spans, memory = make(keys, values)
    queries = jnp.asarray(rng.normal(size=(1, K * G, 1, D)).astype(np.float32)) * 3
    out, after = attend(memory)

    number = np.asarray(spans.span_of[0])
    listed = [np.flatnonzero(number == i) for i in range(number.max() + 1)]
    weights = np.asarray(surprisal[0], np.float64)
    for k in range(K):
        heads = np.asarray(queries[0, k * G : (k + 1) * G, 0], np.float64)
        means = np.stack([weights[s] / weights[s].sum() @ keys[1, 0, k, s] for s in listed])
        sizes = np.log([len(s) for s in listed])
        if head:
            route = np.asarray(zoom.route[...][1], np.float64).reshape(K, G, -1, D)[k]
            mine = np.einsum("gdD,gD->gd", route, heads)
            theirs = np.einsum("gdD,sD->gsd", route, means)
            theirs /= np.linalg.norm(theirs, axis=-1, keepdims=True)
            scores = np.einsum("gd,gsd->gs", mine, theirs) / np.sqrt(route.shape[1]) + sizes - np.log(12)
        else:
            mass = np.exp(heads @ means.T * 0.25 + sizes)
            scores = mass / mass.sum(axis=1, keepdims=True)
        best = scores.max(axis=0)
        opened = [s for s in np.argsort(-best, kind="stable")[:3] if best[s] > 0]
        assert set(opened) == set(np.asarray(after.slot_spans[1, 0, k])[: len(opened)].tolist())
        for g in range(G):
            want = reference.attend(heads[g], keys[1, 0, k], values[1, 0, k], [], listed, weights, opened, 0.25)
            np.testing.assert_allclose(out[0, k, g], want, atol=2e-5)
    assert int(after.fetched[0]) == np.sum(np.asarray(after.slot_spans[1]) >= 0)
    again, later = attend(after)
    assert int(later.fetched[0]) == int(after.fetched[0])  # what is there does not move again
    np.testing.assert_allclose(again, out, atol=1e-6)


def nnx_values(module):
    return {path[0]: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(module))}


def test_a_span_of_one_key_is_summarised_exactly():
    rng = np.random.default_rng(1)
    length = 100
    key = rng.normal(size=(1, 1, 2, 1, 16)).astype(np.float32)
    keys = jnp.asarray(np.repeat(key, length, axis=3))
    values = jnp.asarray(rng.normal(size=(1, 1, 2, length, 16)).astype(np.float32))
    surprisal = jnp.zeros((1, length))  # even weights
    query = jnp.asarray(rng.normal(size=(1, 8, 1, 16)).astype(np.float32))

    @jax.jit
    def attend(keys, values):
        limits = dataclasses.replace(OPEN, slots=0).limits(tiny_config(), jnp.array([length]), length, 4)
        spans = segment(surprisal, jnp.array([length]), limits)
        memory = build_memory(keys, values, surprisal, spans, limits, None, False)
        return finish(memory.attend(query, jnp.int32(0), jnp.ones((1, 1), bool), 0.25)[0]), spans

    (out, log_sum), spans = attend(keys, values)
    inside = np.flatnonzero(np.asarray(spans.span_of[0]) >= 0)
    for k in range(2):
        want = np.asarray(values[0, 0, k, inside]).mean(axis=0)
        np.testing.assert_allclose(out[0, k], np.broadcast_to(want, (4, 16)), atol=1e-5)
        logits = np.asarray(query[0, 4 * k : 4 * k + 4, 0]) @ key[0, 0, k, 0] * 0.25
        np.testing.assert_allclose(log_sum[0, k], logits + np.log(len(inside)), atol=1e-5)


@pytest.mark.parametrize("S, D", [(12, 16), (40, 16), (16, 16)])
def test_factors_are_the_best_of_their_rank(S, D):
    rows = np.random.default_rng(0).normal(size=(3, S, D)).astype(np.float32)
    u, s, v = np.linalg.svd(rows.astype(np.float64), full_matrices=False)
    for rank in (1, 5, min(S, D)):
        left, right, singular = factorize(jnp.asarray(rows), rank)
        np.testing.assert_allclose(left @ right, (u * s[:, None])[..., :rank] @ v[:, :rank], atol=2e-4)
        np.testing.assert_allclose(singular, s[:, :rank], rtol=1e-3)


def test_routing_needs_no_projected_summaries():
    rng = np.random.default_rng(2)
    B, K, G, S, D, d = 2, 2, 4, 7, 16, 4
    queries, keys = rng.normal(size=(B, K, G, D)), rng.normal(size=(B, K, S, D))
    route, threshold = rng.normal(size=(K * G, d, D)), rng.normal(size=K * G)
    counts = rng.integers(1, 30, size=(B, S))
    arrays = [jnp.asarray(x, jnp.float32) for x in (queries, keys, route, threshold)]
    norms = route_norms(arrays[2], arrays[1])
    got = route_scores(arrays[0], arrays[1], norms, jnp.asarray(counts), arrays[2], arrays[3])
    grouped = route.reshape(K, G, d, D)
    mine = np.einsum("kgdD,bkgD->bkgd", grouped, queries)
    theirs = np.einsum("kgdD,bksD->bkgsd", grouped, keys)
    theirs /= np.linalg.norm(theirs, axis=-1, keepdims=True)
    want = np.einsum("bkgd,bkgsd->bkgs", mine, theirs) / np.sqrt(d) + np.log(counts)[:, None, None]
    np.testing.assert_allclose(got, want - threshold.reshape(K, G, 1), atol=1e-4)


def test_weights_are_shares_of_surprisal():
    surprisal = jnp.asarray(np.random.default_rng(0).exponential(size=(1, 100)).astype(np.float32))

    @jax.jit
    def make():
        spans = segment(surprisal, jnp.array([100]), OPEN.limits(tiny_config(), jnp.array([100]), 100, 4))
        return spans, span_weights(surprisal, spans)

    spans, weights = make()
    weights = np.asarray(weights)[0]
    used = np.asarray(spans.counts[0]) > 0
    np.testing.assert_allclose(weights.sum(axis=1), used, atol=1e-6)
    first = np.asarray(spans.members[0, 0])
    first = first[first < 100]
    np.testing.assert_allclose(weights[0, : len(first)], surprisal[0, first] / surprisal[0, first].sum(), rtol=1e-5)


@pytest.mark.parametrize("share", [pytest.param(share, marks=pytest.mark.slow) for share in (0.05, 0.2)] + [0.1])
def test_the_devices_bytes_stay_within_the_share_at_every_step(share):
    model, _ = model_of()
    tokens, lengths = batch((400, 333), 400)
    _, cache = kv.prefill(model, tokens, lengths, SeKV(share), reserve=4)
    full = 2 * model.config.kv_bytes(400, 4)
    for token in (5, 6, 7):
        _, cache = kv.extend(model, cache, [[token]] * 2)
        on_device = cache.nbytes - cache.host_nbytes - cache.tail_keys.nbytes - cache.tail_values.nbytes
        assert on_device <= share * full
        assert np.all(
            np.sum(np.asarray(cache.beyond.slot_spans) >= 0, axis=-1) <= np.asarray(cache.beyond.allowed)[:, None]
        )


def test_a_share_of_one_keeps_everything():
    model, _ = model_of()
    full, cache = kv.prefill(model, *batch(LENGTHS, T), SeKV(1.0), reserve=8)
    assert cache.beyond is None
    want = kv.extend(model, kv.prefill(model, *batch(LENGTHS, T), kv.FullCache(), reserve=8)[1], NEW)[0]
    np.testing.assert_allclose(kv.extend(model, cache, NEW)[0], want, atol=1e-5)


def test_rows_can_be_taken_from_a_memory():
    _, cache = prefilled(TWO)
    taken = cache.beyond.take_rows(jnp.array([1, 1, 0]))
    np.testing.assert_array_equal(taken.keys[:, 2], cache.beyond.keys[:, 0])
    np.testing.assert_array_equal(taken.counts[0], cache.beyond.counts[1])
    assert jax.tree.map(jnp.shape, taken) == jax.tree.map(jnp.shape, cache.beyond)


def test_a_head_is_saved_and_loaded(tmp_path):
    head = ZoomHead(HeadConfig.of(tiny_config()), rngs=nnx.Rngs(1))
    path = tmp_path / "mine.zoom.safetensors"
    save_head(head, path, {"steps": 3})
    loaded, about = load_head(path)
    assert about == {"steps": 3} and loaded.config == head.config
    for mine, theirs in zip(nnx_values(head).values(), nnx_values(loaded).values(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-3)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    policy = SeKV(0.3, head=path, min_span=8)
    logits, _ = kv.extend(model_of()[0], prefilled(policy)[1], NEW)
    assert np.all(np.isfinite(logits))


def test_shipped_heads_are_found_by_the_name_of_their_model():
    files = [path.name.removesuffix(".zoom.safetensors") for path in shipped_folder().glob("*.zoom.safetensors")]
    assert "smollm2-135m" in files
    for name in files:
        head = SeKV(0.2, head=name).head
        _, about = load_head(name)
        assert about["model"] == known_name(name) == name
        assert about["parameters"] == head.size
        assert about["validation_kl"] < about["first_validation_kl"]


@pytest.mark.parametrize("content", [b"", b"text", b"\x10" + b"\0" * 40], ids=["empty", "text", "zeros"])
def test_files_that_are_no_heads(tmp_path, content):
    path = tmp_path / "x.zoom.safetensors"
    path.write_bytes(content)
    with pytest.raises(kv.LoadError, match=r"x.zoom.safetensors: not a zoom-in head"):
        load_head(path)


def test_heads_of_other_models_are_refused():
    head = ZoomHead(HeadConfig.of(tiny_config(num_hidden_layers=2)), rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="head: expected layers 4, as the model has, got 2"):
        kv.prefill(model_of()[0], [[1, 2]], [2], SeKV(head=head))
    head = ZoomHead(HeadConfig.of(tiny_config(), max_rank=8), rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="max_rank: expected at most 8"):
        kv.prefill(model_of()[0], [[1, 2]], [2], SeKV(head=head))


def decompositions(jaxpr) -> int:
    """How often a program calls for eigenvectors."""
    inside = [x for equation in jaxpr.eqns for x in jax.tree.leaves(list(equation.params.values()))]
    calls = sum(equation.primitive.name == "eigh" for equation in jaxpr.eqns)
    return calls + sum(decompositions(getattr(x, "jaxpr", x)) for x in inside if hasattr(x, "eqns"))


def test_no_two_decompositions_can_wait_for_one_another():
    """On CPU each holds a thread of the pool whose other threads it waits for: two at a time can hang two cores."""
    tokens, lengths = batch((150,), 160)
    read = jax.make_jaxpr(lambda *inputs: kv.prefill(*inputs, TWO))(model_of()[0], tokens, lengths)
    lesson = jax.make_jaxpr(lambda *inputs: make_lesson(*inputs, 8, TWO))(model_of()[0], tokens)
    assert decompositions(read.jaxpr) == decompositions(lesson.jaxpr) == 1
