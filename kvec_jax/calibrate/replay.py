"""Reading a prompt, answering it, and looking at the attention of every token of the answer once it is known.

A greedy answer is generated first, over the full cache, and then read again in one pass: the queries of that pass are
those with which it was generated, as the cache holds the same keys.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvec_jax.attention import cache_attention
from kvec_jax.cache import CompressedKV
from kvec_jax.generate import run_decode
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Block, Rotation, Transformer
from kvec_jax.prefill import layer_inputs, layer_reach
from kvec_jax.sampling import Greedy
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class Attending:
    """One layer's attention of new tokens, to be asked again with other values or another cache.

    Attributes:
        queries: [B, N, Q, D], after RoPE.
        keys: [B, K, Q, D], after RoPE.
        values: [B, K, Q, D].
        output: [B, N, Q, D], of the attention over the cache and over one another.
        block: The layer's parameters.
        layer: int32 scalar, traced.
        scale: Factor on the logits.
        reach: How many tokens back a query sees; ``None`` means all.
    """

    queries: Array
    keys: Array
    values: Array
    output: Array
    block: Block
    layer: Array
    scale: float
    reach: Array | None

    def over(self, cache: CompressedKV, values: Array) -> Array:
        """What the same queries get from another cache and other values of the new tokens: [B, N, Q, D]."""
        return cache_attention(self.queries, self.keys, values, cache, self.layer, scale=self.scale, reach=self.reach)

    def project(self, attended: Array) -> Array:
        """Output [B, Q, M] of the layer's W_O for ``attended`` [B, N, Q, D]."""
        B, _, Q, _ = attended.shape
        return attended.swapaxes(1, 2).reshape(B, Q, -1) @ self.block.o_proj[...]


def replay(model: Transformer, cache: CompressedKV, tokens: Array, look: Callable[[Attending], Any]) -> Any:
    """Runs new ``tokens`` int32 [B, Q] over a cache, adding nothing to it; what ``look`` saw, stacked over layers."""
    config = model.config
    rotation = Rotation(config, cache.next_position[:, None] + jnp.arange(tokens.shape[1]))

    def run_layer(hidden, inputs):
        layer, is_local, block = inputs
        queries, keys, values = block.project(hidden)
        queries, keys = (rotation(x, is_local, layer) for x in (queries, keys))
        reach = layer_reach(config, is_local, config.max_position_embeddings)
        output = cache_attention(queries, keys, values, cache, layer, scale=config.scale, reach=reach)
        seen = Attending(queries, keys, values, output, block, layer, config.scale, reach)
        return block.finish(hidden, output), look(seen)

    return lax.scan(run_layer, model.embed(tokens), layer_inputs(model))[1]


def greedy(model: Transformer, cache: CompressedKV, logits: Array, new: int) -> Array:
    """The ``new`` most likely tokens int32 [B, new], filled up with the end token; the cache stays as it is."""
    ends = model.config.eos_token_ids
    return run_decode(model, cache, logits, Greedy(), jax.random.key(0), new, ends).tokens


def compressing(config: ModelConfig) -> np.ndarray:
    """Numbers of the layers that compress: all but local ones."""
    return np.setdiff1d(np.arange(config.num_hidden_layers), np.array(config.local_layers, int))


def pad(rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded tokens int32 [B, length] and their lengths int32 [B]."""
    tokens = np.zeros((len(rows), length), np.int32)
    for into, row in zip(tokens, rows, strict=True):
        into[: len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)
