"""Tiny models for tests, notebooks and examples: real code paths, no downloads."""

import jax.numpy as jnp
from flax import nnx

from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Transformer


def tiny_config(**changes) -> ModelConfig:
    """A Llama-like configuration of four layers, 8 query and 2 key-value heads; ``changes`` replace fields."""
    fields = dict(
        model_type="llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
    )
    return ModelConfig(**(fields | changes))


def tiny_model(seed: int = 0, dtype=jnp.float32, **changes) -> Transformer:
    """A randomly initialised ``Transformer`` of ``tiny_config(**changes)``."""
    return Transformer(tiny_config(**changes), rngs=nnx.Rngs(seed), dtype=dtype)
