"""Families and RoPE scalings without golden files, against an independent numpy forward."""

import math

import numpy as np
import pytest

from kvec_jax.models.load import load_model
from tests.models import published
from tests.models.files import random_tensors, small_config, write_folder
from tests.models.plain import logits

TOKENS = np.random.default_rng(7).integers(0, 96, 70)


def check(tmp_path, config, rotation, window=lambda layer: None, **options):
    tensors = random_tensors(config)
    write_folder(tmp_path, config, tensors)
    loaded = load_model(tmp_path, **options)
    expected = published.forward(config, tensors, TOKENS, rotation, window)
    np.testing.assert_allclose(logits(loaded.model, TOKENS[None])[0], expected, rtol=0, atol=2e-4)
    return loaded.model.config


def test_smollm3_has_layers_without_rope(tmp_path):
    config = small_config("smollm3", num_hidden_layers=5, no_rope_layers=[1, 0, 1, 1, 0], tie_word_embeddings=True)
    freqs = published.plain_frequencies(10000.0, 8)
    check(tmp_path, config, lambda layer: None if layer in (1, 4) else (freqs, 1.0))


def test_mistral_with_a_window_on_every_layer(tmp_path):
    config = small_config("mistral", sliding_window=16)
    freqs = published.plain_frequencies(10000.0, 8)
    parsed = check(tmp_path, config, lambda layer: (freqs, 1.0), lambda layer: 16)
    assert parsed.local_layers == (0, 1, 2)


def test_qwen2_with_a_window_on_the_upper_layers(tmp_path):
    config = small_config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    freqs = published.plain_frequencies(10000.0, 8)
    check(tmp_path, config, lambda layer: (freqs, 1.0), lambda layer: 8 if layer >= 1 else None)


def test_linear_scaling(tmp_path):
    config = small_config("llama", rope_scaling={"type": "linear", "factor": 4.0})
    freqs = [f / 4 for f in published.plain_frequencies(10000.0, 8)]
    check(tmp_path, config, lambda layer: (freqs, 1.0))


YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    "settings, factor",
    [
        ({}, 0.1 * math.log(8) + 1),
        ({"attention_factor": 1.3, "truncate": False}, 1.3),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
    ],
)
def test_yarn(tmp_path, settings, factor):
    config = small_config("qwen2", rope_scaling=YARN | settings | {"beta_fast": 8, "beta_slow": 0.5}, hidden_size=64)
    freqs = published.yarn_frequencies(10000.0, 16, 8.0, 64, 8, 0.5, settings.get("truncate", True))
    parsed = check(tmp_path, config, lambda layer: (freqs, factor))
    assert parsed.max_position_embeddings == 512


def phi3_config(**changes):
    scaling = {"type": "longrope", "long_factor": [1.0, 2.0, 5.0, 11.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
    return small_config("phi3", rope_scaling=scaling, original_max_position_embeddings=128, **changes)


@pytest.mark.parametrize("context, factors", [(None, [1, 2, 5, 11]), (128, [1, 1.1, 1.2, 1.3])])
def test_phi3_longrope(tmp_path, context, factors):
    plain = published.plain_frequencies(10000.0, 8)
    freqs = [f / by for f, by in zip(plain, factors, strict=True)]
    scale = math.sqrt(1 + math.log(512 / 128) / math.log(128))
    parsed = check(tmp_path, phi3_config(), lambda layer: (freqs, scale), max_context=context)
    assert parsed.max_position_embeddings == (context or 512)


def test_phi3_rotates_part_of_a_head_in_a_window(tmp_path):
    config = small_config("phi3", partial_rotary_factor=0.75, sliding_window=20, tie_word_embeddings=True)
    freqs = published.plain_frequencies(10000.0, 6)
    check(tmp_path, config, lambda layer: (freqs, 1.0), lambda layer: 20)
