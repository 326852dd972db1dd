"""Prompts that were read once and are put on tiers again and again, to compare what is done with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.cache import coverage
from kvec_jax.models.transformer import Transformer
from kvec_jax.running import round_up
from kvec_jax.tiers import programs
from kvec_jax.tiers.decoder import TieredDecoder
from kvec_jax.tiers.layout import make_layout
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.prefill import PromptLayers, compress, cut_layers
from kvec_jax.tiers.recorder import Recorder
from kvec_jax.tiers.resident import Parts, bits_dtype
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class Reading:
    """Everything that a decoder is filled with. The whole cache stays in memory.

    Attributes:
        model: The decoder.
        lengths: int32 [B], of the prompts.
        rows: Most tokens that a head keeps.
        new: Most tokens to generate.
        layers: What was read.
        logits: float32 [B, V], of each row's last token.
        coverage: float64 [B], share of the positions that at least one head keeps.
    """

    model: Transformer
    lengths: Array
    rows: int
    new: int
    layers: list[Parts]
    logits: Array
    coverage: np.ndarray

    @classmethod
    def of(cls, model: Transformer, tokens: Array, lengths: Array, policy: Tiered, new: int) -> "Reading":
        """Reads prompts int32 [B, T], for ``policy`` and those that are read alike."""
        B, rows = tokens.shape
        bits = bits_dtype(model.dtype)
        if policy.policy is None:
            layers = PromptLayers(model, tokens, lengths, make_layout(model.config, policy, B, rows, new, bits))
            parts = [jax.block_until_ready(each) for each in layers]
            logits = programs.last_logits(model, layers.hidden, lengths)
            return cls(model, lengths, rows, new, parts, logits, np.ones(B))
        logits, cache = compress(model, tokens, lengths, policy.policy)
        rows = round_up(max(int(jnp.max(cache.counts)), 1), 64)
        layout = make_layout(model.config, policy, B, rows, new, bits)
        parts = list(cut_layers(cache, model.config, rows, layout))
        return cls(model, lengths, rows, new, parts, logits, coverage(cache))

    def decoder(self, policy: Tiered, recorder: Recorder | None = None) -> TieredDecoder:
        """A decoder over tiers that hold the prompts; it must be closed."""
        decoder = TieredDecoder(self.model, policy, self.lengths, self.rows, self.new, recorder)
        try:
            decoder.fill(self.layers)
        except BaseException:
            decoder.close()
            raise
        return decoder


def read_alike(one: Tiered, other: Tiered) -> bool:
    """Whether what is read for one policy serves the other too: they differ in budget and tiers only."""
    names = ("policy", "block_tokens", "index", "sinks", "recent", "flush")
    return all(getattr(one, name) == getattr(other, name) for name in names)
