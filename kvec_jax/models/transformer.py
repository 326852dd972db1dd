"""One functional decoder for every family: the layers' parameters are stacked, so that they can be scanned."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from kvec_jax.models.config import ModelConfig
from kvec_jax.models.rope import Rope, angles, rotate
from kvec_jax.typing import Array

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Divides ``x`` [..., M] by its root mean square and scales it; in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight).astype(x.dtype)


class Block(nnx.Module):
    """Parameters of the layers, and what one layer computes around its attention.

    Every parameter has a leading layer axis L; ``lax.scan`` over the block takes it away. Projections are stored
    ``[in, out]``, heads flattened into the ``out`` axis (into ``in`` for ``o_proj``), so query head n is columns
    ``[n * D, (n + 1) * D)``. Norm weights are float32 and multiply directly (Gemma's ``1 +`` is folded in at load).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        L, M, D = config.num_hidden_layers, config.hidden_size, config.head_dim
        N, K, F = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size

        def matrix(rows, columns):
            values = jax.random.normal(rngs.params(), (L, rows, columns), jnp.float32)
            return nnx.Param((values * rows**-0.5).astype(dtype))

        def ones(width):
            return nnx.Param(jnp.ones((L, width), jnp.float32))

        self.config = config
        self.input_norm = ones(M)
        self.q_proj, self.k_proj, self.v_proj = matrix(M, N * D), matrix(M, K * D), matrix(M, K * D)
        self.o_proj = matrix(N * D, M)
        self.mlp_norm = ones(M)
        self.gate_proj, self.up_proj, self.down_proj = matrix(M, F), matrix(M, F), matrix(F, M)
        if config.attention_bias:
            self.q_bias = nnx.Param(jnp.zeros((L, N * D), dtype))
            self.k_bias = nnx.Param(jnp.zeros((L, K * D), dtype))
            self.v_bias = nnx.Param(jnp.zeros((L, K * D), dtype))
        if config.qk_norm:
            self.q_norm, self.k_norm = ones(D), ones(D)
        if config.post_norms:
            self.post_attention_norm, self.post_mlp_norm = ones(M), ones(M)

    def project(self, hidden: Array) -> tuple[Array, Array, Array]:
        """Queries [B, N, T, D], keys and values [B, K, T, D] of one layer, before RoPE, from ``hidden`` [B, T, M]."""
        config = self.config
        x = rms_norm(hidden, self.input_norm[...], config.rms_norm_eps)
        q, k, v = x @ self.q_proj[...], x @ self.k_proj[...], x @ self.v_proj[...]
        if config.attention_bias:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        q, k, v = (_split_heads(a, config.head_dim) for a in (q, k, v))
        if config.qk_norm:
            q = rms_norm(q, self.q_norm[...], config.rms_norm_eps)
            k = rms_norm(k, self.k_norm[...], config.rms_norm_eps)
        return q, k, v

    def feed_forward(self, x: Array, gate: Array, up: Array, down: Array) -> Array:
        """The gated MLP of ``x`` [B, T, M]; over parts of F of the matrices [M, F], [M, F] and [F, M] it is a sum."""
        return self._multiply(_ACTIVATIONS[self.config.hidden_act](x @ gate) * (x @ up), down)

    def finish(self, hidden: Array, attended: Array, feed_forward: Callable[[Array], Array] | None = None) -> Array:
        """The rest of the layer: output projection of ``attended`` [B, N, T, D], residuals and MLP; [B, T, M].

        ``feed_forward`` is for another way to compute the MLP.
        """
        config = self.config
        out = self._multiply(_merge_heads(attended), self.o_proj[...])
        if config.post_norms:
            out = rms_norm(out, self.post_attention_norm[...], config.rms_norm_eps)
        hidden = hidden + out
        x = rms_norm(hidden, self.mlp_norm[...], config.rms_norm_eps)
        if feed_forward is None:
            out = self.feed_forward(x, self.gate_proj[...], self.up_proj[...], self.down_proj[...])
        else:
            out = feed_forward(x)
        if config.post_norms:
            out = rms_norm(out, self.post_mlp_norm[...], config.rms_norm_eps)
        return hidden + out

    def _multiply(self, x: Array, matrix: Array) -> Array:
        """``x`` times a ``matrix``, of both of which each device has some columns."""
        part = self.config.part
        return part.gather(part.gather(x, -1) @ matrix, -1)

    @property
    def output_projection(self) -> Array:
        """W_O of each head, [..., N, D, M]."""
        matrix = self.config.part.rows_of(self.o_proj[...])
        return matrix.reshape(*matrix.shape[:-2], self.config.num_attention_heads, self.config.head_dim, -1)


class Transformer(nnx.Module):
    """A decoder-only Transformer; a pytree that is passed to ``jax.jit`` and never mutated.

    Args:
        config: Shape and features.
        rngs: Where random weights come from (``nnx.eval_shape`` gives the shapes alone).
        dtype: Of the matrices and the activations; norms are kept in float32.
        mesh: Devices that share the parameters, see ``kvec_jax.shard``; ``None`` for a model that lies on one.

    Example:
        >>> from kvec_jax.testing import tiny_config
        >>> model = Transformer(tiny_config(), rngs=nnx.Rngs(0))
        >>> model.embed(jnp.zeros((1, 3), jnp.int32)).shape
        (1, 3, 64)
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32, mesh: Mesh | None = None
    ):
        V, M = config.vocab_size, config.hidden_size
        self.config, self.mesh = config, mesh
        self.embedding = nnx.Param((0.02 * jax.random.normal(rngs.params(), (V, M), jnp.float32)).astype(dtype))
        self.layers = Block(config, rngs=rngs, dtype=dtype)
        self.final_norm = nnx.Param(jnp.ones((M,), jnp.float32))
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param((M**-0.5 * jax.random.normal(rngs.params(), (V, M), jnp.float32)).astype(dtype))

    @property
    def dtype(self) -> jnp.dtype:
        """Of the matrices, the activations and the cache."""
        return self.embedding.get_value().dtype

    def embed(self, tokens: Array) -> Array:
        """Hidden states [B, T, M] that enter the first layer, from ``tokens`` int32 [B, T]."""
        hidden = self.config.part.look_up(self.embedding[...], tokens)
        # Gemma rounds the factor to the embeddings' dtype before it multiplies.
        return hidden * jnp.asarray(self.config.embedding_scale, hidden.dtype)

    def unembed(self, hidden: Array) -> Array:
        """Logits float32 [..., V] of the last layer's ``hidden`` [..., M]."""
        x = rms_norm(hidden, self.final_norm[...], self.config.rms_norm_eps)
        matrix = self.embedding if self.config.tie_word_embeddings else self.lm_head
        logits = jnp.einsum("...M,VM->...V", x, matrix[...], preferred_element_type=jnp.float32)
        return self.config.part.gather(logits, -1)


def layer_inputs(model: Transformer):
    """What a scan over the layers reads: number, whether local, parameters."""
    config = model.config
    is_local = np.zeros(config.num_hidden_layers, bool)
    is_local[list(config.local_layers)] = True
    return jnp.arange(config.num_hidden_layers), jnp.asarray(is_local), model.layers


def layer_reach(config, is_local: Array, everything: int) -> Array | None:
    """How many tokens back a layer's queries see; ``None`` where no layer of the model is local."""
    return jnp.where(is_local, config.sliding_window, everything) if config.local_layers else None


class Rotation:
    """RoPE at given positions, for whichever kind of layer asks.

    Args:
        config: Of the model.
        positions: int32 [B, T].
    """

    def __init__(self, config: ModelConfig, positions: Array):
        self._config = config
        self._global = angles(positions, config.rope, config.head_dim)
        local = config.local_rope or config.rope
        self._local = None if local == config.rope else angles(positions, local, config.head_dim)

    def __call__(self, x: Array, is_local: Array, layer: Array | None = None) -> Array:
        """Rotates ``x`` [B, heads, T, D]; ``is_local`` is a scalar bool, ``layer`` a scalar int32, both may be traced.

        ``layer`` is needed only where the model has layers without rotation (``config.no_rope_layers``).
        """
        cos, sin = self._global
        if self._local is not None:
            cos, sin = (jnp.where(is_local, a, b) for a, b in zip(self._local, self._global, strict=True))
        rotated = rotate(x, cos, sin)
        if not self._config.no_rope_layers:
            return rotated
        if layer is None:
            raise ValueError("layer: a model with no_rope_layers needs the layer's index to rotate")
        plain = jnp.isin(layer, jnp.asarray(self._config.no_rope_layers, jnp.int32))
        return jnp.where(plain, x, rotated)


def _split_heads(x: Array, head_dim: int) -> Array:
    B, T, _ = x.shape
    return x.reshape(B, T, -1, head_dim).swapaxes(1, 2)


def _merge_heads(x: Array) -> Array:
    B, N, T, D = x.shape
    return x.swapaxes(1, 2).reshape(B, T, N * D)


__all__ = ["Block", "Rope", "Rotation", "Transformer", "rms_norm"]
