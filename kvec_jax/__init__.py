"""kvec_jax: key-value cache compression for long-context language models, in JAX."""

__version__ = "0.1.0"
