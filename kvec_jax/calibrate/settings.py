"""What a calibration is asked to do: how much is measured, and on what text."""

import dataclasses
import hashlib
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from kvec_jax.arguments import check_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured.

    Attributes:
        episodes: Right answers needed, over which the heads' scores are averaged.
        lengths: Of the prompts with needles, in tokens; texts take turns. The longest is that of the prompts for
            eviction errors, too.
        layer_texts: For eviction errors; each has a prompt of every kind.
        seed: Of the choice of texts, needles and places.
    """

    episodes: int = 100
    lengths: tuple[int, ...] = (256, 384, 512)
    layer_texts: int = 6
    seed: int = 0

    def __post_init__(self):
        for name in ("episodes", "layer_texts"):
            check_count(name, getattr(self, name), 1)
        check_count("seed", self.seed, 0)
        if not self.lengths:
            raise ValueError("lengths: expected at least one")
        for length in self.lengths:
            check_count("lengths", length, 64)

    @classmethod
    def quick(cls) -> "Settings":
        """For a look at the procedure; too little to rely on."""
        return cls(episodes=8, lengths=(256,), layer_texts=1)


@dataclasses.dataclass(frozen=True)
class Text:
    """Held-out text.

    Attributes:
        text: Paragraphs.
        source: What it is, for people.
    """

    text: str
    source: str

    @classmethod
    def reference(cls) -> "Text":
        """Python's language reference, which is part of its standard library."""
        from kvec_jax.demo import reference_text

        return cls(reference_text(), f"pydoc_data.topics of Python {platform.python_version()}")

    @classmethod
    def files(cls, paths: Sequence[str | os.PathLike]) -> "Text":
        """Files, one after the other.

        Raises:
            ValueError: If one is not text in UTF-8.
        """
        texts = []
        for path in map(pathlib.Path, paths):
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                raise ValueError(f"{path}: expected text in UTF-8") from None
        return cls("\n\n".join(texts), ", ".join(pathlib.Path(path).name for path in paths))

    def describe(self) -> dict[str, Any]:
        """Plain values that tell it from other texts."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"source": self.source, "characters": len(self.text), "sha256": digest}
