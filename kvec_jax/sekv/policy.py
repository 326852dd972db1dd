"""SeKV as a policy: everything is kept, coarse on the device, fine on the host, https://arxiv.org/abs/2606.31145."""

import dataclasses
import os
from typing import Any

import jax.numpy as jnp

from kvec_jax import host
from kvec_jax.arguments import check_choice, check_count, check_number
from kvec_jax.cache import CompressedKV
from kvec_jax.errors import UnsupportedError
from kvec_jax.forms import Form
from kvec_jax.implementations import Implementations
from kvec_jax.keeping import keeper
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies.streaming import FullCache
from kvec_jax.prefill import as_cache, read_layers
from kvec_jax.sekv.build import build_memory, exact_pool
from kvec_jax.sekv.head import ZoomHead, load_head
from kvec_jax.sekv.plan import Limits, make_limits
from kvec_jax.sekv.spans import segment, surprisals
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class SeKV(Form):
    """Semantic spans with summaries on the device and low-rank detail on the host, https://arxiv.org/abs/2606.31145.

    The prompt is cut where the model's own surprisal exceeds mean + ``alpha`` * std. On the device stay: sinks, the
    most surprising tokens (anchors) and a recent window, exactly; and of every span the surprisal-weighted mean of its
    keys and values, which counts ln n more in the softmax. The host holds truncated SVD factors of every span. At each
    step every layer and key-value head expands the spans that matter most to the new token; their factors are brought
    to the device, where they stay until others need the place.

    All of it fits ``device_share`` of the full cache's bytes by construction, at every step and whatever the text: the
    anchors are capped and the spans are as long as that asks for, and the number of expanded spans is bounded. Tokens
    that come after the prompt are kept exactly besides, as with every policy.

    Choices: the paper's spans below 16 tokens stay exact, which alone can exceed the budget; here they merge with their
    neighbour. Only spans above the thresholds are expanded, those with the highest score of any query head of the group
    first; all heads of the group then read their rows. Keys are averaged after RoPE. Gates for values are separate. A
    span's factors take a quarter of its rows' bytes, not all that a rank of 32 would, so that more spans can be
    expanded at once; they have the cache's dtype. While the prompt is read the full cache exists once: its spans are
    known only then.

    Args:
        device_share: Bytes on the device as a share of those of the full cache, in (0, 1].
        head: A trained zoom-in head: a ``ZoomHead``, a file, or the name of a model whose head is shipped. ``None`` is
            the untrained mode: spans are chosen by the similarity of their summary and their length alone.
        alpha: How many standard deviations above its mean a surprisal cuts.
        sinks: First tokens that stay exact.
        min_span: Fewest tokens of a span; more where the device's bytes ask for it.
        max_span: Most tokens of a span; ``None`` means about twice the fewest, up to 128.
        max_rank: Most rank of a span's factors.
        rank_share: Bytes of a span's factors as a share of those of its rows, at most.
        factors: Where they lie: ``"host"``, ``"device"``, or ``None`` for the host's memory on TPU and GPU and
            ordinary memory on CPU.

    Raises:
        ValueError: For a number out of range.
        LoadError: If there is no such head.

    Example:
        >>> import kvec_jax as kv
        >>> from kvec_jax.testing import tiny_model
        >>> tokens = jnp.arange(200)[None] % 256
        >>> _, cache = kv.prefill(tiny_model(), tokens, jnp.array([200]), SeKV(0.25))
        >>> full = 2 * 4 * 2 * 200 * 16 * 4  # keys and values of layers, heads and tokens, of 16 floats
        >>> cache.pool_nbytes < 0.25 * full, cache.host_nbytes > 0
        (True, True)
    """

    device_share: float = 0.1
    # What a head holds reaches a program as its argument; as a setting it plays no part in what is compiled.
    head: ZoomHead | str | os.PathLike | None = dataclasses.field(default=None, compare=False, repr=False, kw_only=True)
    alpha: float = dataclasses.field(default=1.0, kw_only=True)
    sinks: int = dataclasses.field(default=4, kw_only=True)
    min_span: int = dataclasses.field(default=16, kw_only=True)
    max_span: int | None = dataclasses.field(default=None, kw_only=True)
    max_rank: int = dataclasses.field(default=32, kw_only=True)
    rank_share: float = dataclasses.field(default=0.25, kw_only=True)
    factors: str | None = dataclasses.field(default=None, kw_only=True)

    name = "sekv"

    def __post_init__(self):
        for name, value in (("device_share", self.device_share), ("rank_share", self.rank_share)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ValueError(f"{name}: expected a share in (0, 1], got {value!r}")
        check_number("alpha", self.alpha)
        check_count("sinks", self.sinks, 0)
        check_count("min_span", self.min_span, 1)
        check_count("max_rank", self.max_rank, 1)
        if self.max_span is not None:
            check_count("max_span", self.max_span, self.min_span)
        check_choice("factors", self.factors, (None, "host", "device"))
        if self.head is not None and not isinstance(self.head, ZoomHead):
            if not isinstance(self.head, str | os.PathLike):
                raise ValueError(f"head: expected a ZoomHead, a file or the name of a model, got {self.head!r}")
            object.__setattr__(self, "head", load_head(self.head)[0])

    def prepare(self, model: Transformer) -> ZoomHead | None:
        """The trained head, if there is one; checks that head and model go together."""
        _check_model(model.config)
        if self.head is not None:
            self.head.check(model.config, self.max_rank)
        return self.head

    def limits(self, config: ModelConfig, lengths: Array, T: int, itemsize: int) -> Limits:
        """How much of each part there may be for prompts of ``lengths`` [B], padded to T."""
        return make_limits(
            lengths, T, device_share=self.device_share, head_dim=config.head_dim, groups=config.groups,
            itemsize=itemsize, sinks=self.sinks, min_span=self.min_span, max_span=self.max_span,
            max_rank=self.max_rank, rank_share=self.rank_share,
        )  # fmt: skip

    def read(
        self,
        model: Transformer,
        prepared: Any,
        tokens: Array,
        lengths: Array,
        reserve: int,
        all_logits: bool,
        how: Implementations,
    ) -> tuple[Array, CompressedKV]:
        """See ``kvec_jax.forms.Form``."""
        hidden, keys, values = read_everything(model, tokens, lengths, how)
        limits = self.limits(model.config, lengths, tokens.shape[1], keys.dtype.itemsize)
        surprisal = surprisals(model, hidden, tokens)
        spans = segment(surprisal, lengths, limits, self.alpha)
        cache = as_cache(exact_pool(keys, values, spans, limits), model.config, lengths, reserve)
        if limits.max_spans:
            apart = host.apart() if self.factors is None else self.factors == "host"
            memory = build_memory(keys, values, surprisal, spans, limits, prepared, apart)
            cache = dataclasses.replace(cache, beyond=memory)
        if not all_logits:
            hidden = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return model.unembed(hidden), cache


def read_everything(
    model: Transformer, tokens: Array, lengths: Array, how: Implementations = Implementations()
) -> tuple[Array, Array, Array]:
    """Hidden states [B, T, M] of the last layer, and keys and values [L, B, K, T, D] of all layers."""
    B, T = tokens.shape
    config = model.config
    hidden, pool = read_layers(model, None, tokens, lengths, None, keeper(FullCache(), config, lengths, T), how)
    shape = B, config.num_hidden_layers, config.num_key_value_heads, T, config.head_dim
    return hidden, *(jnp.moveaxis(x.reshape(shape), 1, 0) for x in (pool.keys, pool.values))


def _check_model(config: ModelConfig) -> None:
    if config.local_layers:
        raise UnsupportedError(
            f"SeKV: models with local (sliding window) layers are not supported, and {config.model_type} has "
            f"{len(config.local_layers)}"
        )
