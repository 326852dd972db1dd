"""Calibration files: what CompressKV must know of a model, with how it was found out."""

import dataclasses
import json
import os
import re
from typing import Any

from kvec_jax.errors import LoadError
from kvec_jax.files import write_whole
from kvec_jax.shipped import find_file

_FORMAT = "kvec_jax calibration 1"
_SUFFIX = ".calibration.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured of a model.

    Attributes:
        model: Its name.
        heads: For each layer that compresses, its query heads, the best retrieval heads first; empty for a layer whose
            heads never looked at a needle.
        layer_weights: Error that eviction causes in each layer's output, as a share of all; they add up to 1.
        provenance: Plain values: the procedure's settings, text, counts and versions.
    """

    model: str
    heads: tuple[tuple[int, ...], ...]
    layer_weights: tuple[float, ...]
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        object.__setattr__(self, "heads", tuple(tuple(int(head) for head in layer) for layer in self.heads))
        object.__setattr__(self, "layer_weights", tuple(float(weight) for weight in self.layer_weights))
        if len(self.heads) != len(self.layer_weights):
            raise ValueError(f"expected heads and weights of the same layers, got {len(self.heads)} and "
                             f"{len(self.layer_weights)}")  # fmt: skip

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file, whole or not at all."""
        content = {"format": _FORMAT} | dataclasses.asdict(self)
        write_whole(path, _short_lists(json.dumps(content, indent=1)) + "\n")


def load_calibration(name_or_path: str | os.PathLike) -> Calibration:
    """Reads a calibration.

    Args:
        name_or_path: A file that ``Calibration.save`` wrote, or the name of a model whose calibration is shipped.

    Raises:
        LoadError: If there is none, or the file is not one; it names the command that makes one.
    """
    path = find_file(name_or_path, _SUFFIX, "calibration", "kvec calibrate {} --out FILE")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        return Calibration(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: not a calibration file of this version ({error})") from error


def _short_lists(text: str) -> str:
    """Puts lists of numbers on one line each. A string can't be mistaken for one: JSON has no line breaks in them."""
    return re.sub(r"\[\n\s*([-+.,\deE\s]*?)\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text)
