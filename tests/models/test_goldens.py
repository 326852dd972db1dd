"""Five tiny models with the logits of transformers."""

import numpy as np
import pytest

from kvec_jax.models.load import load_model
from tests.models.files import GOLDENS
from tests.models.plain import logits

NAMES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]


@pytest.mark.parametrize("name", NAMES)
def test_logits(name):
    loaded = load_model(GOLDENS / name)
    expected = np.load(GOLDENS / name / "logits.npz")
    got = logits(loaded.model, expected["ids"], expected["positions"])
    np.testing.assert_allclose(got, expected["logits"], rtol=0, atol=2e-4)
    assert loaded.tokenizer is None


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_is_close(name):
    loaded = load_model(GOLDENS / name, dtype="bfloat16")
    assert loaded.model.dtype == "bfloat16"
    assert loaded.model.final_norm.get_value().dtype == "float32"
    expected = np.load(GOLDENS / name / "logits.npz")
    got = logits(loaded.model, expected["ids"], expected["positions"])
    error = np.abs(got - expected["logits"]).mean() / np.abs(expected["logits"]).mean()
    assert error < 0.05
