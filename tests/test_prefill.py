"""Reading prompts: shapes of models, budgets at their limits, compilation, memory, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvec_jax as kv
from kvec_jax.models.rope import Rope
from tests.compilations import count_compilations
from tests.oracle import policies
from tests.oracle.forward import forward, weights
from tests.prompts import as_lists, batch, model_of, prompt, trace_of

LENGTHS = (5, 29, 40)
T = 40
POLICY = kv.SnapKV(16, window=6, kernel=3)


def oracle(trace):
    return policies.snapkv(trace, 16, 6, 3)


def check_next_tokens(model, w, cache, lengths, seed=0):
    """Two more tokens have the logits of attention over what was kept."""
    logits, _ = kv.extend(model, cache, jnp.asarray([[3, 200]] * len(lengths)), all_logits=True)
    for row, length in enumerate(lengths):
        want = forward(model.config, w, [*prompt(length, seed), 3, 200], cache.kept_positions(row), length).logits
        np.testing.assert_allclose(logits[row], want[-2:], atol=5e-5)


# N, K, D: groups of 1, 3, 4 and 8 query heads.
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 64), (4, 1, 64), (16, 2, 16)], ids=str)
def test_head_shapes(shape):
    changes = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), shape), num_hidden_layers=2)
    model, w = model_of(**changes)
    _, cache = kv.prefill(model, *batch(LENGTHS, T), POLICY, reserve=2)
    for row, length in enumerate(LENGTHS):
        assert as_lists(cache.kept_positions(row)) == as_lists(oracle(trace_of(length, **changes)))
    check_next_tokens(model, w, cache, LENGTHS)


FEATURES = {
    "qwen": dict(attention_bias=True, qk_norm=True, tie_word_embeddings=True, attention_scale=0.4),
    "gemma": dict(
        post_norms=True,
        qk_norm=True,
        embedding_scale=8.0,
        hidden_act="gelu_tanh",
        sliding_window=8,
        local_layers=(0, 1, 3),
        rope=Rope(theta=1e6, kind="linear", factor=8.0),
        local_rope=Rope(theta=1e4),
    ),
    "llama3": dict(rope=Rope(theta=5e5, kind="llama3", factor=8.0, original_max_position=32)),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_the_families(name):
    """All parameters are random here, norms and biases too, so that one that is left out shows."""
    graph, state = nnx.split(model_of(**FEATURES[name])[0])
    rng = np.random.default_rng(5)
    noisy = jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + 0.2 * rng.normal(size=x.shape), x.dtype), state)
    model = nnx.merge(graph, noisy)
    w = weights(model)
    logits, cache = kv.prefill(model, *batch(LENGTHS, T), POLICY, reserve=2, all_logits=True)
    for row, length in enumerate(LENGTHS):
        want = forward(model.config, w, prompt(length)).logits
        np.testing.assert_allclose(logits[row, :length], want, atol=2e-4 * np.abs(want).max())
    got, _ = kv.extend(model, cache, jnp.asarray([[3]] * 3))
    for row, length in enumerate(LENGTHS):
        want = forward(model.config, w, [*prompt(length), 3], cache.kept_positions(row), length).logits[-1]
        np.testing.assert_allclose(got[row], want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    "policy",
    [kv.FullCache(), kv.SnapKV(41), kv.SnapKV(1.0, window=50), kv.StreamingLLM(40)],
    ids=["full", "over", "share", "same"],
)
def test_a_budget_for_everything_is_full_attention(policy):
    model, w = model_of()
    logits, cache = kv.prefill(model, *batch(LENGTHS, T), policy, reserve=2, all_logits=True)
    assert logits.shape == (3, T, 256) and logits.dtype == jnp.float32
    for row, length in enumerate(LENGTHS):
        assert as_lists(cache.kept_positions(row)) == [[list(range(length))] * 2] * 4
        np.testing.assert_allclose(logits[row, :length], trace_of(length).logits, atol=5e-5)
    new, _ = kv.extend(model, cache, jnp.asarray([[3, 200]] * 3), all_logits=True)
    for row, length in enumerate(LENGTHS):
        want = forward(model.config, w, [*prompt(length), 3, 200]).logits
        np.testing.assert_allclose(new[row], want[-2:], atol=5e-5)


@dataclasses.dataclass(frozen=True)
class OneHead(kv.Stateless):
    """Likes the entries of one head of each layer, above all others, and of those the oldest."""

    def score(self, seen, carry):
        B, K, T, _ = seen.keys.shape
        mine = jnp.arange(K)[:, None] == (seen.layer + 1) % K
        return jnp.broadcast_to(jnp.where(mine, 1000.0, 0.0) - jnp.arange(T), (B, K, T)), carry


def test_heads_that_keep_nothing():
    model, w = model_of()
    policy = kv.Policy(scorer=OneHead(), budget=10, scope="layer")
    _, cache = kv.prefill(model, *batch(LENGTHS, T), policy, reserve=2)
    kept = cache.kept_positions(2)
    assert as_lists(kept) == [[[], list(range(20))], [list(range(20)), []]] * 2
    check_next_tokens(model, w, cache, LENGTHS)


@dataclasses.dataclass(frozen=True)
class Middle(kv.Stateless):
    """Likes the entries around position 20."""

    def score(self, seen, carry):
        B, K, T, _ = seen.keys.shape
        return jnp.broadcast_to(-jnp.abs(jnp.arange(T) - 20.0), (B, K, T)), carry


def test_sinks_and_window_come_first_whatever_the_scores():
    model, _ = model_of()
    policy = kv.Policy(scorer=Middle(window=4), budget=10, sinks=3)
    _, cache = kv.prefill(model, *batch(LENGTHS, T), policy)
    assert as_lists(cache.kept_positions(2))[0] == [[0, 1, 2, 19, 20, 21, 36, 37, 38, 39]] * 2
    tight = kv.Policy(scorer=Middle(window=4), budget=0.1, sinks=3)
    _, cache = kv.prefill(model, *batch(LENGTHS, T), tight)
    assert as_lists(cache.kept_positions(0))[0] == [[4]] * 2
    assert as_lists(cache.kept_positions(1))[0] == [[26, 27, 28]] * 2


def test_a_prompt_of_one_token():
    model, w = model_of()
    logits, cache = kv.prefill(model, *batch((1,), 1), POLICY, reserve=2)
    np.testing.assert_allclose(logits[0], trace_of(1).logits[-1], atol=5e-5)
    assert as_lists(cache.kept_positions(0)) == [[[0], [0]]] * 4
    check_next_tokens(model, w, cache, (1,))


def test_lengths_of_one_bucket_share_a_program():
    model, _ = model_of()
    kv.prefill(model, *batch((40, 3), T), POLICY)
    with count_compilations() as compiled:
        kv.prefill(model, *batch((7, 31), T, seed=1), POLICY)
        kv.prefill(model, *batch((40, 40), T, seed=2), kv.SnapKV(16, window=6, kernel=3))
    assert compiled == []


def test_only_one_layer_is_ever_whole():
    """What the program needs besides its results stays far below the uncompressed cache, and grows with no layer."""
    length, needed = 2048, []
    for layers in (4, 32):
        model, _ = model_of(num_hidden_layers=layers)
        tokens, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, length), (1,)))
        compiled = jax.jit(lambda *args: kv.prefill(*args, kv.SnapKV(64))).lower(model, tokens, lengths).compile()
        memory = compiled.memory_analysis()
        needed.append(memory.temp_size_in_bytes)
        kept = layers * 64 * model.config.num_key_value_heads * (2 * model.config.head_dim * 4 + 4)
        assert memory.output_size_in_bytes < 1.2 * kept + 10_000
    growth = (needed[1] - needed[0]) / 28
    full_layer = model.config.kv_bytes(length, 4) / 32
    assert growth < 0.2 * full_layer + model.config.hidden_size**2 * 40


TOKENS = np.ones((2, 8), np.int32)
FAULTS = {
    "floats": (TOKENS * 1.0, [8, 8], r"tokens: expected integers of shape \[B, T\], got float"),
    "one row without batch": (TOKENS[0], [8], r"tokens: expected integers of shape \[B, T\]"),
    "text": ([["a"]], [1], "tokens: expected integers"),
    "ragged list": ([[1, 2], [3]], [2, 1], "tokens: expected integers"),
    "no rows": (TOKENS[:0], [], "tokens: expected at least one row"),
    "no columns": (TOKENS[:, :0], [0, 0], "tokens: expected at least one row and one token"),
    "beyond the vocabulary": (TOKENS * 256, [8, 8], "tokens: expected 0 to 255, got 256 to 256"),
    "negative": (-TOKENS, [8, 8], "tokens: expected 0 to 255, got -1"),
    "beyond the context": (
        np.ones((1, 2049), np.int32),
        [9],
        "tokens: 2049 tokens take 2049 positions, more than the model's context of 2048",
    ),
    "empty prompt": (TOKENS, [8, 0], "lengths: expected 1 to 8, got 0"),
    "length beyond T": (TOKENS, [9, 8], "lengths: expected 1 to 8, got 8 to 9"),
    "too few lengths": (TOKENS, [8], "lengths: expected 2 integers"),
    "lengths as floats": (TOKENS, [8.0, 8.0], "lengths: expected 2 integers"),
    "one length": (TOKENS, 8, "lengths: expected 2 integers"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_prompts(name):
    tokens, lengths, message = FAULTS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        kv.prefill(model_of()[0], tokens, lengths, POLICY)


@pytest.mark.parametrize(
    "policy", ["snapkv", None, 64, kv.SnapKV], ids=lambda value: getattr(value, "__name__", repr(value))
)
def test_bad_policies(policy):
    with pytest.raises(TypeError, match="policy: expected a Policy"):
        kv.prefill(model_of()[0], TOKENS, [8, 8], policy)


@pytest.mark.parametrize("reserve", [-1, 1.5, "many", None])
def test_bad_reserves(reserve):
    with pytest.raises((TypeError, ValueError), match="reserve: expected an integer, 0 or more"):
        kv.prefill(model_of()[0], TOKENS, [8, 8], POLICY, reserve=reserve)
