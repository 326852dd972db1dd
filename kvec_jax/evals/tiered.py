"""What is measured of prompts over tiers, whose steps the host drives, one token at a time."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.models.transformer import Transformer
from kvec_jax.sampling import Greedy
from kvec_jax.tiers.decoder import TieredDecoder
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.reading import Reading
from kvec_jax.tiers.recorder import compiled_seconds
from kvec_jax.typing import Array

Padded = tuple[np.ndarray, np.ndarray]


def run_tiered(
    model: Transformer, policies: Sequence[Tiered], prompt: Padded, question: Padded, gold: Padded, new: int, room: int
) -> Iterator[tuple[Array, list[dict[str, Any]], np.ndarray | None, dict[str, Any]]]:
    """Reads prompts once, and puts them on tiers twice per policy: for the right answer, and for one of their own.

    Args:
        model: The decoder.
        policies: How the caches are spread; they are read alike.
        prompt: Tokens int32 [B, T] and lengths [B].
        question: Likewise; it is read after the prompt.
        gold: The right answer, likewise.
        new: Most tokens to write; with 0 nothing is.
        room: Tokens after the prompt, at least those of the question and an answer.

    Yields:
        For each policy: logits float32 [B, n, V] before each token of ``gold``; the costs of each prompt; what was
        written, int32 [B, new], or ``None``; and seconds, without compilation.
    """
    clock, rows = _Clock(), len(prompt[1])
    reading = Reading.of(model, *map(jnp.asarray, prompt), policies[0], room)
    seconds = clock.lap()
    for policy in policies:
        with reading.decoder(policy) as decoder:
            costs = _costs(decoder, reading)
            before = _ask(decoder, reading, question)
            logits = jnp.stack([before, *decoder.follow(gold[0][:, :-1], gold[1] - 1)], axis=1)
        answers, spent = None, 0.0
        if new:
            with reading.decoder(policy) as decoder:
                before, ends = _ask(decoder, reading, question), model.config.eos_token_ids
                clock.lap()
                state = decoder.begin(before, Greedy(), jax.random.key(0), new, ends)
                answers = decoder.advance(state, Greedy(), jax.random.key(0), new, ends).tokens
                spent = clock.lap()
        times = dict(prefill_seconds=seconds / rows, decode_seconds=spent / rows)
        yield logits, costs, answers, times | dict(read_together=len(policies))


def _ask(decoder: TieredDecoder, reading: Reading, question: Padded) -> Array:
    """Logits [B, V] after the question."""
    logits = jnp.stack([reading.logits, *decoder.follow(*question)])
    return logits[jnp.asarray(question[1]), jnp.arange(logits.shape[1])]


def _costs(decoder: TieredDecoder, reading: Reading) -> list[dict[str, Any]]:
    config = reading.model.config
    share = sum(decoder.device_bytes) // len(reading.lengths)
    heads = config.num_hidden_layers * config.num_key_value_heads
    kept = decoder.kept() / (np.asarray(reading.lengths) * heads)
    return [
        dict(cache_bytes=share, kept=float(part), coverage=float(covered), where=None)
        for part, covered in zip(kept, reading.coverage, strict=True)
    ]


class _Clock:
    """Seconds from lap to lap, without those of compilation."""

    def __init__(self) -> None:
        self._last = self._now()

    def lap(self) -> float:
        last, self._last = self._last, self._now()
        return self._last - last

    def _now(self) -> float:
        return time.perf_counter() - compiled_seconds()
