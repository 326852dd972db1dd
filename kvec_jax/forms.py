"""What a cache may hold besides chosen rows, and the policies that bring such a form of their own.

An eviction policy chooses rows, which the pool of a ``CompressedKV`` holds. A policy with a form of its own (SeKV's
spans, rows on slower memory) reads the prompt itself, and puts what doesn't fit the pool behind the cache's ``beyond``.
Everything after the prompt is shared: a step attends to pool, tail and new tokens as always, asks ``beyond`` for
attention over the rest, and merges the two.
"""

from typing import Any, Protocol

from kvec_jax.online_softmax import Partial
from kvec_jax.typing import Array


class Beyond(Protocol):
    """What lies beyond a cache's pool and tail; a registered pytree, carried through the scan over the layers.

    Attributes:
        device_nbytes: Bytes that it holds in the memory of the device.
        host_nbytes: Bytes that it holds in the memory of the host.
        moved_nbytes: float32 [B], bytes brought from there to the device for each row so far.
    """

    device_nbytes: int
    host_nbytes: int
    moved_nbytes: Array

    def attend(self, queries: Array, layer: Array, real: Array, scale: float) -> tuple[Partial, "Beyond"]:
        """Attention of new tokens over what one layer has here.

        Args:
            queries: [B, N, Q, D], after RoPE.
            layer: int32 scalar, traced.
            real: bool [B, Q]; what other tokens than these give is of no meaning, and they leave no trace.
            scale: Factor on the logits.

        Returns:
            The partial of shape [B, K, G * Q], the query heads of a key-value head together, and what is carried on
            (what was fetched, say).
        """

    def take_rows(self, index: Array) -> "Beyond":
        """The rows ``index`` int32 [rows] of the batch, in that order; a row may be taken more than once."""


class Driven:
    """Base of policies whose steps the host drives one by one, so that no single program generates.

    Of all that takes a policy, only ``LanguageModel.generate`` takes these.

    Attributes:
        name: What tables and errors call it.
    """

    name: str = "driven"

    def write_text(
        self, lm, tokens, lengths, *, sampler, key: Array, max_new_tokens: int, ends: tuple[int, ...], listeners
    ) -> list:
        """The ``Output`` of each padded prompt; ``tokens`` int32 [B, T], ``lengths`` int32 [B]."""
        raise NotImplementedError


class Form:
    """Base of policies whose cache has a form of its own. A frozen dataclass, static under ``jit``.

    Attributes:
        name: What tables call it.
    """

    name: str = "form"

    def prepare(self, model) -> Any:
        """The arrays that ``read`` needs besides the model, which thereby stay arguments of the program."""
        return None

    def read(
        self, model, prepared: Any, tokens: Array, lengths: Array, reserve: int, all_logits: bool, how
    ) -> tuple[Array, Any]:
        """Reads prompts under ``jit``; arguments and results are those of ``kvec_jax.prefill.run_prefill``."""
        raise NotImplementedError
