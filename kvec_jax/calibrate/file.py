"""Calibration files: what CompressKV must know of a model, with how it was found out."""

import dataclasses
import json
import os
import pathlib
import re
from typing import Any

from kvec_jax.errors import LoadError
from kvec_jax.files import write_whole
from kvec_jax.models.registry import KNOWN_MODELS

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
    path, name = pathlib.Path(name_or_path), os.fspath(name_or_path)
    if not path.is_file():
        path = shipped_folder() / f"{known_name(name) or name}{_SUFFIX}"
    if not path.is_file():
        shipped = sorted(file.name.removesuffix(_SUFFIX) for file in shipped_folder().glob(f"*{_SUFFIX}"))
        raise LoadError(
            f"no calibration for {name!r} (shipped: {', '.join(shipped) or 'none'}); "
            f"make one with: kvec calibrate {name} --out FILE"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        return Calibration(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: not a calibration file of this version ({error})") from error


def shipped_folder() -> pathlib.Path:
    """Where the calibrations that come with the package are: inside it, or beside it where it is a source checkout."""
    package = pathlib.Path(__file__).parent.parent
    inside = package / "checkpoints"
    return inside if inside.is_dir() else package.parent / "checkpoints"


def known_name(name_or_path: str | os.PathLike) -> str | None:
    """The short name of a known model that is given by it, by its hub repository, or by its GGUF file.

    Example:
        >>> known_name("HuggingFaceTB/SmolLM2-135M-Instruct"), known_name("my/own-model")
        ('smollm2-135m', None)
    """
    asked = os.fspath(name_or_path)
    for model in KNOWN_MODELS.values():
        if asked in (model.name, model.hub) or pathlib.Path(asked).name == model.file:
            return model.name
    return None


def _short_lists(text: str) -> str:
    """Puts lists of numbers on one line each. A string can't be mistaken for one: JSON has no line breaks in them."""
    return re.sub(r"\[\n\s*([-+.,\deE\s]*?)\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text)
