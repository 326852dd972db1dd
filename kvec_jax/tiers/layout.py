"""The sizes of a run over tiers, which are static in every program."""

import dataclasses
import math

import numpy as np

from kvec_jax.models.config import ModelConfig
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.store import StoreShape

# Chosen blocks that a head's share of the device holds where nobody says how much it is.
WINDOW = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How much there is of everything; hashable.

    Attributes:
        layers: L.
        rows: B, of a micro-batch.
        heads: K.
        head_dim: D.
        block_tokens: P.
        blocks: Most blocks of a head, those of generated tokens included.
        top: Most blocks that a step chooses for a head.
        hints: Further blocks that a step names.
        ring: Room for recent and generated tokens.
        sinks: First tokens.
        recent: Last tokens that stay out of blocks.
        budget: As in ``Tiered``.
        clustered: Whether blocks hold similar keys rather than neighbours.
        window: Tokens that a local layer keeps; 0 where no layer is local.
        per_extent: Blocks that lie together on disk.
    """

    layers: int
    rows: int
    heads: int
    head_dim: int
    block_tokens: int
    blocks: int
    top: int
    hints: int
    ring: int
    sinks: int
    recent: int
    budget: float | int
    clustered: bool
    window: int
    per_extent: int

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of a block: keys and values, tokens, numbers."""
        return 2, self.block_tokens, self.head_dim


def make_layout(config: ModelConfig, policy: Tiered, rows: int, prompt_rows: int, new_tokens: int, dtype) -> Layout:
    """The sizes for prompts of which a head keeps up to ``prompt_rows`` tokens, and ``new_tokens`` generated ones.

    ``dtype`` is what numbers are stored as.
    """
    P = policy.block_tokens
    flushes = max(new_tokens - 1, 0) // policy.flush
    blocks = max(max(prompt_rows - policy.sinks - policy.recent, 0) // P + -(-flushes * policy.flush // P), 1)
    window = min(config.sliding_window or 0, prompt_rows) if config.local_layers else 0
    # A flush leaves less than a block more than `recent`.
    ring = max(policy.recent + P - 1, window) + min(policy.flush, max(new_tokens - 1, 1))
    top = wanted_blocks(policy.budget, blocks, P)
    layout = Layout(
        layers=config.num_hidden_layers,
        rows=rows,
        heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        block_tokens=P,
        blocks=blocks,
        top=top,
        hints=min(policy.hints, blocks - top),
        ring=ring,
        sinks=policy.sinks,
        recent=policy.recent,
        budget=policy.budget,
        clustered=policy.index == "clusters",
        window=window,
        per_extent=1,
    )
    return dataclasses.replace(layout, per_extent=store_shape(config, layout, rows, dtype).per_extent)


def wanted_blocks(budget: float | int, blocks: int, block_tokens: int) -> int:
    """How many of a head's ``blocks`` a step chooses.

    Example:
        >>> wanted_blocks(0.0625, 100, 8), wanted_blocks(256, 100, 8), wanted_blocks(256, 10, 8)
        (6, 32, 10)
    """
    if isinstance(budget, float):
        return max(math.floor(blocks * budget + 1e-4), 1)
    return min(max(budget // block_tokens, 1), blocks)


def store_shape(config: ModelConfig, layout: Layout, rows: int, dtype) -> StoreShape:
    """What the store of a run over ``rows`` prompts holds."""
    return StoreShape(
        layers=layout.layers,
        rows=rows,
        heads=layout.heads,
        blocks=layout.blocks,
        block_tokens=layout.block_tokens,
        head_dim=layout.head_dim,
        dtype=np.dtype(dtype),
        stored_layers=layout.layers - len(config.local_layers),
    )
