"""The zoom-in head: what is trained of SeKV, beside a frozen model."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvec_jax.errors import LoadError
from kvec_jax.files import replacing
from kvec_jax.models.config import ModelConfig
from kvec_jax.shipped import find_file
from kvec_jax.typing import Array

_FORMAT = "kvec_jax zoom head 1"
_SUFFIX = ".zoom.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes of a zoom-in head.

    Attributes:
        layers, heads, head_dim: L, N and D of the model.
        route_dim: Numbers that a query and a summary are compared by.
        max_rank: Singular values that the rank gates see.
        hidden: Width of the gates' network.
        typical_span: Tokens of a span, for which the thresholds start at even odds.
    """

    layers: int
    heads: int
    head_dim: int
    route_dim: int
    max_rank: int = 32
    hidden: int = 64
    typical_span: int = 48

    @classmethod
    def of(cls, config: ModelConfig, **changes) -> "HeadConfig":
        """For a model; routing keys are a quarter of a head wide, as in the paper (32 of 128)."""
        sizes = dict(layers=config.num_hidden_layers, heads=config.num_attention_heads, head_dim=config.head_dim)
        return cls(**(sizes | dict(route_dim=max(config.head_dim // 4, 2)) | changes))


class ZoomHead(nnx.Module):
    """Decides which spans are read in detail, and how much of their factors counts.

    ``route`` [L, N, d, D] projects queries and summaries; ``threshold`` [L, N] is what a span's score must exceed (the
    paper's tau is its sigmoid); three small matrices, shared by all layers and heads, gate the singular values.

    Args:
        config: Sizes.
        rngs: Where random weights come from.

    Example:
        >>> head = ZoomHead(HeadConfig(layers=2, heads=4, head_dim=16, route_dim=4), rngs=nnx.Rngs(0))
        >>> head.threshold.shape
        (2, 4)
    """

    def __init__(self, config: HeadConfig, *, rngs: nnx.Rngs):
        L, N, D, d = config.layers, config.heads, config.head_dim, config.route_dim
        R, H = config.max_rank, config.hidden

        def matrix(rows, columns):
            return nnx.Param(jax.nn.initializers.lecun_normal()(rngs.params(), (rows, columns)))

        self.config = config
        # Orthogonal rows: a projected product is, on average, the share d / D of the product itself.
        self.route = nnx.Param(jax.nn.initializers.orthogonal(column_axis=-1)(rngs.params(), (L, N, d, D)))
        self.threshold = nnx.Param(jnp.full((L, N), np.log(config.typical_span), jnp.float32))
        self.gate_in, self.gate_mid, self.gate_out = matrix(R + D, H), matrix(H, H), matrix(H, R)
        self.gate_in_bias, self.gate_mid_bias = nnx.Param(jnp.zeros(H)), nnx.Param(jnp.zeros(H))
        # Open at the start: closed gates would halve every reconstructed row.
        self.gate_out_bias = nnx.Param(jnp.full(R, 4.0))

    def gates(self, singular: Array, mean: Array, ranks: Array) -> Array:
        """How much of each singular value counts: float32 [..., R], in (0, 1), 0 from a span's rank on.

        Args:
            singular: float32 [..., R], the largest first; R may be less than ``max_rank``.
            mean: [..., D], the summary of the span.
            ranks: int32 [...].
        """
        R = singular.shape[-1]
        used = jnp.arange(R) < ranks[..., None]
        spectrum = jnp.where(used, singular, 0) / (singular[..., :1] + 1e-8)
        spectrum = jnp.pad(spectrum, [(0, 0)] * (spectrum.ndim - 1) + [(0, self.config.max_rank - R)])
        x = jnp.concatenate([spectrum, normalized(mean.astype(jnp.float32))], axis=-1)
        x = jax.nn.gelu(x @ self.gate_in[...] + self.gate_in_bias[...])
        x = jax.nn.gelu(x @ self.gate_mid[...] + self.gate_mid_bias[...])
        x = x @ self.gate_out[..., :R] + self.gate_out_bias[..., :R]
        return jnp.where(used, jax.nn.sigmoid(x), 0)

    def check(self, config: ModelConfig, max_rank: int) -> None:
        """Raises unless the head is of such a model, and knows of such ranks."""
        mine, model = self.config, HeadConfig.of(config)
        for name in ("layers", "heads", "head_dim"):
            if getattr(mine, name) != getattr(model, name):
                raise ValueError(f"head: expected {name} {getattr(model, name)}, as the model has, "
                                 f"got {getattr(mine, name)}")  # fmt: skip
        if max_rank > mine.max_rank:
            raise ValueError(f"max_rank: expected at most {mine.max_rank}, which the head was trained for, "
                             f"got {max_rank}")  # fmt: skip

    @property
    def size(self) -> int:
        """Trained numbers."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self)))


def normalized(x: Array) -> Array:
    """``x`` [..., D] divided by its length."""
    return x * _inverse_length(x)[..., None]


def _inverse_length(x: Array) -> Array:
    """1 / length of ``x`` [..., D]; unlike that of a norm, its gradient is finite where spans are missing, at 0."""
    return jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1), 1e-12))


def route_norms(route: Array, mean_keys: Array) -> Array:
    """1 / length of every projected summary, float32 [B, N, S], of one layer.

    With these and the summaries themselves no projected summary needs to be stored.

    Args:
        route: [N, d, D].
        mean_keys: [B, K, S, D].
    """
    B, K, S, D = mean_keys.shape
    grouped = route.reshape(K, -1, *route.shape[1:])
    projected = jnp.einsum("KGdD,BKSD->BKGSd", grouped, mean_keys.astype(jnp.float32))
    return _inverse_length(projected).reshape(B, -1, S)


def route_scores(
    queries: Array, mean_keys: Array, norms: Array, counts: Array, route: Array, threshold: Array
) -> Array:
    """By how much each span exceeds each query head's threshold, in logits: float32 [B, K, G, S] (paper, eq. 6-7).

    The paper compares sigmoid(similarity / sqrt(d) + ln n) with tau; before the sigmoid the decision is the same.

    Args:
        queries: [B, K, G, D], of one token.
        mean_keys: [B, K, S, D].
        norms: float32 [B, N, S], of ``route_norms``.
        counts: int32 [B, S].
        route: [N, d, D].
        threshold: float32 [N].
    """
    B, K, G, D = queries.shape
    grouped = route.reshape(K, G, *route.shape[1:])
    projected = jnp.einsum("KGdD,BKGD->BKGd", grouped, queries.astype(jnp.float32))
    back = jnp.einsum("KGdD,BKGd->BKGD", grouped, projected)
    similarity = jnp.einsum("BKGD,BKSD->BKGS", back, mean_keys.astype(jnp.float32)) * norms.reshape(B, K, G, -1)
    prior = jnp.log(jnp.maximum(counts, 1).astype(jnp.float32))[:, None, None]
    return similarity / np.sqrt(route.shape[1]) + prior - threshold.reshape(K, G, 1)


def save_head(head: ZoomHead, path: str | os.PathLike, provenance: dict) -> None:
    """Writes a head as one safetensors file in half precision, whole or not at all.

    Args:
        head: What to write.
        path: A file ending in ``.zoom.safetensors``, if it is to be found by the name of a model.
        provenance: Plain values: how it was made.
    """
    import safetensors.numpy

    tensors = {name: np.asarray(value, np.float16) for name, value in values_of(head).items()}
    about = {"format": _FORMAT, "config": dataclasses.asdict(head.config), "provenance": provenance}
    content = safetensors.numpy.save(tensors, {"kvec_jax": json.dumps(about)})
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


def load_head(name_or_path: str | os.PathLike) -> tuple[ZoomHead, dict]:
    """Reads a head, and how it was made.

    Args:
        name_or_path: A file that ``save_head`` wrote, or the name of a model whose head is shipped.

    Raises:
        LoadError: If there is none, or the file is not one; it names the command that makes one.
    """
    import safetensors

    command = "kvec train-zoom --model {} --text FILES --out DIR"
    path = find_file(name_or_path, _SUFFIX, "zoom-in head", command)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            about = json.loads(file.metadata()["kvec_jax"])
            if about["format"] != _FORMAT:
                raise ValueError("another format")
            head = ZoomHead(HeadConfig(**about["config"]), rngs=nnx.Rngs(0))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        shapes = {key: value.shape for key, value in values_of(head).items()}
        if shapes != {key: value.shape for key, value in tensors.items()}:
            raise ValueError("tensors that don't fit its sizes")
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise LoadError(f"{path}: not a zoom-in head of this version ({error})") from error
    head = with_values(head, {key: jnp.asarray(value, jnp.float32) for key, value in tensors.items()})
    return head, about["provenance"]


def with_values(head: ZoomHead, values: dict[str, Array]) -> ZoomHead:
    """A head of the same sizes with other values."""
    graph, state = nnx.split(head)
    flat = [(path, leaf.replace(values[path[0]])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def values_of(head: ZoomHead) -> dict[str, Array]:
    """What is trained, by name."""
    return {path[0]: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(head))}
