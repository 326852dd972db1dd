"""Frequencies and rotations on their own."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax.models.rope import Rope, angles, rotate
from kvec_jax.models.transformer import Rotation
from kvec_jax.testing import tiny_config
from tests.models.published import plain_frequencies, yarn_frequencies


def test_yarn_of_qwen():
    rope = Rope(theta=1e6, kind="yarn", factor=4.0, original_max_position=32768)
    expected = yarn_frequencies(1e6, 128, 4.0, 32768)
    np.testing.assert_allclose(rope.inverse_frequencies(128), expected, rtol=1e-5)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    rope = Rope(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192)
    ratio = np.asarray(plain_frequencies(5e5, 128)) / rope.inverse_frequencies(128)
    np.testing.assert_allclose(ratio[:28], 1.0, rtol=1e-5)
    np.testing.assert_allclose(ratio[-25:], 8.0, rtol=1e-5)
    assert np.all(np.diff(ratio) > -1e-5)


def test_only_relative_positions_matter():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def product(a, b):
        turned = [rotate(x, *angles(jnp.array([[p]]), Rope(), 16)) for x, p in ((q, a), (k, b))]
        return float((turned[0] * turned[1]).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)


def test_a_part_of_the_head():
    x = jnp.arange(16, dtype=jnp.float32).reshape(1, 1, 1, 16)
    got = rotate(x, *angles(jnp.array([[3]]), Rope(fraction=0.5), 16))
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    assert not np.allclose(got[..., :8], x[..., :8])


def test_layers_without_rotation_need_the_index():
    config = tiny_config(no_rope_layers=(1, 3))
    rotation = Rotation(config, jnp.array([[5]]))
    x = jnp.ones((1, 2, 1, 16))
    np.testing.assert_array_equal(rotation(x, False, 3), x)
    assert not np.allclose(rotation(x, False, 2), x)
    with pytest.raises(ValueError, match="needs the layer's index"):
        rotation(x, False)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kind": "ntk"}, "kind: expected one of default, linear, llama3, longrope, yarn, got 'ntk'"),
        ({"theta": 0.0}, "theta: expected"),
        ({"fraction": 1.5}, "fraction: expected"),
    ],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Rope(**fields)
    with pytest.raises(ValueError, match="pair_factors: expected 8 numbers, got 1"):
        Rope(kind="longrope", pair_factors=(1.0,)).inverse_frequencies(16)
