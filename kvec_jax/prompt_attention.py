"""Attention of a prompt over itself: blockwise in plain XLA, or what JAX ships for the platform."""

import jax.numpy as jnp
from jax import lax

from kvec_jax.online_softmax import attend_blocks, finish
from kvec_jax.pallas.dispatch import choose
from kvec_jax.typing import Array, Implementation

QUERY_BLOCK = 256
KEY_BLOCK = 512


def attend_prompt(
    queries: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    *,
    scale: float,
    reach: Array | None = None,
    window: int | None = None,
    implementation: Implementation = None,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """Causal attention of a right-padded prompt over itself.

    On a TPU that is JAX's splash attention kernel, on a GPU cuDNN's flash attention. Neither looks at ``lengths``: a
    real token never sees the padding behind it.

    Args:
        queries: [B, N, T, D].
        keys: [B, K, T, D].
        values: [B, K, T, D].
        lengths: int32 [B], real tokens of each row. What a padded query gives is of no meaning.
        scale: Factor on the logits.
        reach: int32 scalar, traced: how many tokens back a query sees, itself included; ``None`` means all.
        window: What ``reach`` is where it is less than everything; static. Kernels must know it.
        implementation: See ``kvec_jax.Implementations``.
        interpret: Whether a kernel is interpreted; cuDNN's is replaced by plain attention.

    Returns:
        [B, N, T, D] in the queries' dtype; and float32 [B, N, T], the log-sum-exp of each real query's logits, or
        ``None`` where the kernel doesn't give it at little cost.

    Raises:
        UnsupportedError: If the implementation that was asked for can't do this.
    """
    from kvec_jax.pallas import prompt_attention_gpu, prompt_attention_tpu  # not before kernels may be needed

    unknown = None if reach is None or window else "how far back local layers see must be known when it is compiled"
    refusals = dict(
        pallas_tpu=unknown or prompt_attention_tpu.refusal(queries, keys),
        pallas_gpu=unknown or prompt_attention_gpu.refusal(queries, keys, interpret),
    )
    chosen = choose("prompt_attention", implementation, **refusals)
    if chosen == "xla":
        return _attend_blockwise(queries, keys, values, lengths, scale, reach)
    kernel = prompt_attention_tpu if chosen == "pallas_tpu" else prompt_attention_gpu

    def attend(window):
        return lambda: kernel.attend(queries, keys, values, scale, window, interpret)

    if reach is None:
        return attend(None)()
    return lax.cond(reach <= window, attend(window), attend(None))


def _attend_blockwise(
    queries: Array, keys: Array, values: Array, lengths: Array, scale: float, reach: Array | None
) -> tuple[Array, Array]:
    """No T x T matrix exists, and blocks that no query sees are not touched."""
    B, N, T, D = queries.shape
    K = keys.shape[1]
    G = N // K
    query_block, key_block = min(QUERY_BLOCK, T), min(KEY_BLOCK, T)
    blocks = -(-T // query_block)
    # Rows of one key-value head's query group lie together, so that each block of keys is read once for all of them.
    missing = blocks * query_block - T
    queries = jnp.pad(queries.reshape(B, K, G, T, D), [(0, 0)] * 3 + [(0, missing), (0, 0)])
    longest = jnp.max(lengths)

    def attend(i):
        top = i * query_block
        mine = lax.dynamic_slice_in_dim(queries, top, query_block, axis=3).reshape(B, K, G * query_block, D)
        positions = jnp.tile(top + jnp.arange(query_block), G)

        def fetch(j):
            start = jnp.minimum(j * key_block, T - key_block)
            at = start + jnp.arange(key_block)
            mask = (at >= j * key_block) & (at <= positions[:, None])
            if reach is not None:
                mask &= at > positions[:, None] - reach
            rows = (lax.dynamic_slice_in_dim(x, start, key_block, axis=2) for x in (keys, values))
            return *rows, mask

        bottom = jnp.minimum(top + query_block, longest)
        first = 0 if reach is None else jnp.maximum(top - reach + 1, 0) // key_block
        last = jnp.where(top < longest, -(-bottom // key_block), 0)
        out, logsumexp = finish(attend_blocks(mine, fetch, first, last, scale))
        out = out.astype(queries.dtype).reshape(B, K, G, query_block, D)
        return out, logsumexp.reshape(B, K, G, query_block)

    out, logsumexp = lax.map(attend, jnp.arange(blocks))  # [blocks, B, K, G, query_block, ...]
    out = jnp.moveaxis(out, 0, 3).reshape(B, N, blocks * query_block, D)
    logsumexp = jnp.moveaxis(logsumexp, 0, 3).reshape(B, N, blocks * query_block)
    return out[:, :, :T], logsumexp[:, :, :T]
