"""Tiny models for tests, notebooks and examples: real code paths, no downloads."""

import jax.numpy as jnp
from flax import nnx

from kvec_jax import session
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.tokenizer import Tokenizer
from kvec_jax.models.transformer import Transformer

_CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"


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


def tiny_tokenizer(chat: bool = True) -> Tokenizer:
    """A tokenizer with a token for each byte, and a chat template unless ``chat`` is false.

    Example:
        >>> tokenizer = tiny_tokenizer()
        >>> tokenizer.decode(tokenizer.encode("Zoë")), len(tokenizer.encode("Zoë"))
        ('Zoë', 4)
    """
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(core, chat_template=_CHAT if chat else None)


def tiny_language_model(seed: int = 0, dtype=jnp.float32, chat: bool = True, **changes) -> "session.LanguageModel":
    """The tiny model with the tiny tokenizer: text in, nonsense out.

    Example:
        >>> output = tiny_language_model().generate("some text", max_new_tokens=5)
        >>> len(output.tokens)
        5
    """
    return session.LanguageModel(tiny_model(seed, dtype, **changes), tiny_tokenizer(chat), "tiny")
