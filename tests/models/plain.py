"""A forward pass without cache, with plain full attention, around the library's ``Block``."""

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.models.transformer import Rotation, Transformer


@jax.jit
def _logits(model: Transformer, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    config = model.config
    B, T = tokens.shape
    index = jnp.arange(T)
    rotation = Rotation(config, jnp.broadcast_to(index, (B, T)))
    causal = index[None] <= index[:, None]
    near = index[:, None] - index[None] < (config.sliding_window or T)
    layers = np.arange(config.num_hidden_layers)
    local = np.isin(layers, config.local_layers)

    def step(hidden, scanned):
        block, layer, is_local = scanned
        q, k, v = block.project(hidden)
        q, k = rotation(q, is_local, layer), rotation(k, is_local, layer)
        k, v = (jnp.repeat(x, config.groups, axis=1) for x in (k, v))
        scores = jnp.einsum("BNTD,BNSD->BNTS", q, k) * config.scale
        weights = jax.nn.softmax(jnp.where(causal & (near | ~is_local), scores, -jnp.inf), axis=-1)
        return block.finish(hidden, jnp.einsum("BNTS,BNSD->BNTD", weights, v)), None

    hidden, _ = jax.lax.scan(step, model.embed(tokens), (model.layers, jnp.asarray(layers), jnp.asarray(local)))
    return model.unembed(hidden[:, positions])


def logits(model: Transformer, tokens, positions=None) -> np.ndarray:
    """Logits float32 [B, positions, V] of ``tokens`` [B, T]; ``None`` means all positions."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(tokens.shape[1]) if positions is None else jnp.asarray(positions)
    return np.asarray(_logits(model, tokens, positions))
