"""What distinguishes one decoder-only Transformer from another, as one frozen dataclass."""

import dataclasses

from kvec_jax.models.rope import Rope
from kvec_jax.part import WHOLE, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and features of a decoder; hashable, named as in Hugging Face's ``config.json``.

    Attributes:
        model_type: Family, e.g. ``"llama"``.
        vocab_size: V.
        hidden_size: M.
        intermediate_size: Width of the gated MLP.
        num_hidden_layers: L.
        num_attention_heads: N.
        num_key_value_heads: K; a divisor of N.
        head_dim: D.
        max_position_embeddings: Longest context, in tokens.
        rms_norm_eps: Epsilon of every RMS norm.
        hidden_act: ``"silu"`` or ``"gelu_tanh"``.
        tie_word_embeddings: Whether the output matrix is the embedding.
        attention_bias: Biases on the query, key and value projections (Qwen2).
        qk_norm: RMS norm of each head's queries and keys before RoPE (Qwen3, Gemma 3).
        post_norms: RMS norms after attention and after the MLP as well as before (Gemma 3).
        embedding_scale: Factor on the embeddings (Gemma 3: sqrt(M)).
        attention_scale: Factor on the logits of attention; ``None`` means ``head_dim ** -0.5``.
        rope: Rotation of the global layers.
        local_rope: Rotation of the local layers; ``None`` means the same as ``rope``.
        sliding_window: Tokens that a local layer sees, itself included; ``None`` where no layer is local.
        local_layers: Indices of the layers with a sliding window.
        no_rope_layers: Indices of the layers that don't rotate queries and keys (SmolLM3).
        eos_token_ids: Tokens that end a generation.
        bos_token_id: Token that begins a text, if the model has one.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    rope: Rope = Rope()
    local_rope: Rope | None = None
    sliding_window: int | None = None
    local_layers: tuple[int, ...] = ()
    no_rope_layers: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    # What a device has of the model; see ``PartConfig``.
    part = WHOLE

    def __post_init__(self):
        positive = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads head_dim max_position_embeddings"
        ).split()
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: expected a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}), got {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        if self.hidden_act not in ("silu", "gelu_tanh"):
            raise ValueError(f"hidden_act: expected 'silu' or 'gelu_tanh', got {self.hidden_act!r}")
        if self.local_layers and not self.sliding_window:
            raise ValueError("local_layers needs sliding_window")
        for name in ("local_layers", "no_rope_layers"):
            if any(not 0 <= layer < self.num_hidden_layers for layer in getattr(self, name)):
                raise ValueError(f"{name}: expected indices below {self.num_hidden_layers}, got {getattr(self, name)}")

    @property
    def groups(self) -> int:
        """G: query heads per key-value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def all_attention_heads(self) -> int:
        """Query heads of a layer, over all devices that share them."""
        return self.num_attention_heads * self.part.heads

    @property
    def all_key_value_heads(self) -> int:
        """Key-value heads of a layer, over all devices that share them."""
        return self.num_key_value_heads * self.part.heads

    @property
    def scale(self) -> float:
        """Factor on the logits of attention."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def with_context(self, max_context: int) -> "ModelConfig":
        """The same configuration with a context of ``max_context`` tokens, which may not be longer than it is."""
        if not isinstance(max_context, int) or not 1 <= max_context <= self.max_position_embeddings:
            raise ValueError(f"max_context: expected 1 to {self.max_position_embeddings}, got {max_context!r}")
        return dataclasses.replace(self, max_position_embeddings=max_context)

    def kv_bytes(self, tokens: int, itemsize: int, budget: int | None = None) -> int:
        """Bytes of the keys and values of a prompt.

        Args:
            tokens: Of the prompt.
            itemsize: Bytes of a number.
            budget: Tokens that each head of a global layer keeps; ``None`` means all. Local layers keep their window.
        """
        kept = tokens if budget is None else min(budget, tokens)
        local = len(self.local_layers)
        rows = kept * (self.num_hidden_layers - local) + min(tokens, self.sliding_window or tokens) * local
        return 2 * rows * self.num_key_value_heads * self.head_dim * itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartConfig(ModelConfig):
    """What one of the devices that share a model has of it: its number of heads is that of this device.

    Attributes:
        part: How many devices share it.
    """

    part: Part

    @classmethod
    def of(cls, config: ModelConfig, part: Part) -> "PartConfig":
        """The part of a whole model's ``config``."""
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        fields["num_attention_heads"] //= part.heads
        fields["num_key_value_heads"] //= part.heads
        return cls(**fields, part=part)
