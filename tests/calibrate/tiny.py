"""A random model with a tokenizer so small that it says things from the hidden answers by chance."""

import functools
import random

import kvec_jax as kv
from kvec_jax.calibrate.settings import Text
from kvec_jax.testing import tiny_model

VOCABULARY = 16


class Letters:
    """One token for each byte, of which many share one."""

    chat_template = None

    def encode(self, text, add_special_tokens=False):
        return [byte % VOCABULARY for byte in text.encode()]

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids)


@functools.cache
def language_model() -> kv.LanguageModel:
    return kv.LanguageModel(tiny_model(vocab_size=VOCABULARY), Letters(), "tiny")


@functools.cache
def text() -> Text:
    rng = random.Random(0)
    words = [f"word{i}" for i in range(300)]
    paragraphs = (" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(60))
    return Text("\n\n".join(paragraphs), "made up")
