"""Windows of text to train on, and others that are held out."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# Share of each text, at its end, that is never trained on.
_HELD_OUT = 0.1


class Windows:
    """Cuts texts into windows of tokens.

    Which windows a step gets depends on the seed and the step alone, so that a training can go on anywhere.

    Args:
        texts: Tokens of each text.
        names: What they are, for people.

    Raises:
        ValueError: If there is no text.
    """

    def __init__(self, texts: Sequence[Sequence[int]], names: Sequence[str]):
        if not texts:
            raise ValueError("text: expected at least one")
        self._texts = [np.asarray(text, np.int32) for text in texts]
        self._names = list(names)

    def batch(self, seed: int, step: int, count: int, length: int) -> np.ndarray:
        """Windows of a step, int32 [count, length], from all texts according to their sizes."""
        parts = [text[: len(text) - _held(text)] for text in self._texts]
        rooms = np.array([max(len(part) - length + 1, 0) for part in parts])
        if not rooms.sum():
            raise ValueError(f"text: expected one of at least {length} tokens, without its last tenth; "
                             f"the longest has {max(map(len, parts))}")  # fmt: skip
        rng = np.random.default_rng([seed, step])
        chosen = rng.choice(len(parts), size=count, p=rooms / rooms.sum())
        starts = [int(rng.integers(rooms[i])) for i in chosen]
        return np.stack([parts[i][start : start + length] for i, start in zip(chosen, starts, strict=True)])

    def held_out(self, count: int, length: int) -> np.ndarray:
        """The same windows of the held-out ends every time, int32 [count, length], evenly spread."""
        ends = np.concatenate([text[len(text) - _held(text) :] for text in self._texts])
        if len(ends) < length:
            raise ValueError(f"text: expected {length} tokens in the last tenth, which is held out, got {len(ends)}")
        starts = np.linspace(0, len(ends) - length, count).astype(int)
        return np.stack([ends[start : start + length] for start in starts])

    def describe(self) -> list[dict[str, Any]]:
        """Plain values that tell these texts from others."""
        return [
            {"name": name, "tokens": len(text), "sha256": hashlib.sha256(text.tobytes()).hexdigest()}
            for name, text in zip(self._names, self._texts, strict=True)
        ]


def _held(text: np.ndarray) -> int:
    return int(len(text) * _HELD_OUT)
