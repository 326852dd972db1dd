"""JAX's own splash attention on a TPU, for prompts of any length."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from kvec_jax.typing import Array

_LANES = 128
_BLOCK = 512


def refusal(queries: Array, keys: Array) -> str | None:
    """Why these arrays can't be had, or ``None``."""
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16 queries and keys of one type, got {queries.dtype} and {keys.dtype}"
    return None


def attend(
    queries: Array, keys: Array, values: Array, scale: float, window: int | None, interpret: bool
) -> tuple[Array, None]:
    """Causal attention, see ``kvec_jax.prompt_attention``; a query sees ``window`` tokens, or all before it.

    The log-sum-exp isn't asked for: the kernel writes 128 numbers for each, more than all keys take.
    """
    B, N, T, D = queries.shape
    K = keys.shape[1]
    block = min(_BLOCK, -(-T // _LANES) * _LANES)
    padded = -(-T // block) * block
    queries, keys, values = (jnp.pad(x, [(0, 0), (0, 0), (0, padded - T), (0, 0)]) for x in (queries, keys, values))
    queries = (queries * scale).astype(queries.dtype).reshape(B, K, N // K, padded, D)
    kernel = _kernel(N // K, padded, block, window, interpret)
    out = jax.vmap(jax.vmap(kernel))(queries, keys, values)
    return out.reshape(B, N, padded, D)[:, :, :T], None


def _kernel(G: int, T: int, block: int, window: int | None, interpret: bool):
    """Attention of [G, T, D] queries over [T, D] keys and values."""
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mqa_single_device(
            masks.MultiHeadMask([_Causal(T, window)] * G),
            block_sizes=splash.BlockSizes(block_q=block, block_kv=block),
            interpret=interpret,
        )


class _Causal(masks.Mask):
    """Which keys a query sees: those up to its own, or the last ``window`` of them.

    JAX's own masks, which are asked block by block what they hold, look at every pair of tokens; for 128k tokens that
    takes minutes. This one answers for most blocks without.
    """

    def __init__(self, T: int, window: int | None):
        self.T, self.window = T, window
        self.q_sequence = np.arange(T, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, int]:
        return self.T, self.T

    def mask_function(self, query, key):
        seen = key <= query
        return seen if self.window is None else seen & (key > query - self.window)

    def __getitem__(self, block) -> np.ndarray:
        rows, columns = (range(*part.indices(self.T)) for part in block)
        oldest, newest = rows[-1] - columns[0], rows[0] - columns[-1]  # ages of the block's pairs
        window = self.window or self.T
        if oldest < 0 or newest >= window:
            return np.zeros((1, 1), bool)
        if newest >= 0 and oldest < window:
            return np.ones((1, 1), bool)
        return self.mask_function(np.array(rows)[:, None], np.array(columns)[None])

    def __eq__(self, other) -> bool:
        return isinstance(other, _Causal) and (self.T, self.window) == (other.T, other.window)

    def __hash__(self) -> int:
        return hash((self.T, self.window))
