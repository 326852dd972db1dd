"""Facts that pin the papers' methods to one another, and published numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvec_jax as kv
from kvec_jax.policies.budgets import Weighted
from tests.oracle import published
from tests.prompts import as_lists, batch, model_of

LENGTHS, T = (90, 200), 200


def kept(policy, model=None):
    _, cache = kv.prefill(model or model_of()[0], *batch(LENGTHS, T), policy)
    return [as_lists(cache.kept_positions(row)) for row in range(2)]


def test_kvec_without_its_modules_is_snapkv():
    plain = kv.KVec(64, window=32, extended_window=32, unfocused_heads=0, novelty_weight=0.0, forced_share=0.0)
    assert kept(plain) == kept(kv.SnapKV(64, window=32, kernel=7, pooling="max"))


def test_kvec_with_novelty_alone_makes_all_heads_agree():
    for layers in kept(kv.KVec(64, novelty_weight=1e6, forced_share=0.0)):
        assert all(heads[0] == heads[1] for heads in layers)


@pytest.mark.parametrize("normalize", [True, False])
def test_scaling_the_output_projection_of_a_layer_leaves_laprox_as_it_is(normalize):
    policy = kv.LaProx(64, normalize=normalize)
    before = kept(policy)
    # The last layer, as its output reaches no other.
    graph, state = nnx.split(model_of()[0])
    model = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    model.layers.o_proj.set_value(model.layers.o_proj[...].at[-1].multiply(8.0))
    assert (kept(policy, model) == before) == normalize


@pytest.mark.parametrize("name", published.COMPRESSKV_SHARES)
def test_compresskv_budgets_are_the_published_ones(name):
    shares = tuple(published.COMPRESSKV_SHARES[name])
    layers = len(shares)
    lengths = jnp.array([10_000, 100_000])
    got = np.asarray(Weighted(weights=shares, tokens=256).per_layer(lengths, layers))
    np.testing.assert_array_equal(got, np.array([published.COMPRESSKV_BUDGETS_256[name]] * 2).T)
    for tokens, ends in zip((128, 512, 1024, 2048), published.COMPRESSKV_EXTREMES[name]):
        got = np.asarray(Weighted(weights=shares, tokens=tokens).per_layer(lengths, layers))
        assert (got.sum(axis=0) == tokens * layers).all()
        np.testing.assert_allclose((got.min(), got.max()), ends, atol=1)  # the shares are known to five digits


@pytest.mark.parametrize("budget", [0.5, 0.9])
def test_cake_uses_its_whole_budget_even_where_layers_are_full(budget):
    for layers, length in zip(kept(kv.CAKE(budget, window=8, tau1=0.2, tau2=0.2)), LENGTHS):
        assert sum(len(h) for heads in layers for h in heads) == 8 * int(budget * length + 0.5)
