"""Calibration files: what CompressKV must know of a model, with how it was found out."""

import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any

from kvec_jax.errors import LoadError

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
        provenance: Plain values: the procedure's settings, texts, counts, versions, date.
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
        write_whole(path, json.dumps(content, indent=1) + "\n")


def load_calibration(name_or_path: str | os.PathLike) -> Calibration:
    """Reads a calibration.

    Args:
        name_or_path: A file that ``Calibration.save`` wrote, or the name of a model whose calibration is shipped.

    Raises:
        LoadError: If there is none, or the file is not one; it names the command that makes one.
    """
    path = pathlib.Path(name_or_path)
    if not path.is_file():
        path = shipped_folder() / f"{pathlib.Path(name_or_path).name}{_SUFFIX}"
    if not path.is_file():
        known = sorted(
            file.name.removesuffix(".calibration.json") for file in shipped_folder().glob("*.calibration.json")
        )
        raise LoadError(
            f"no calibration for {os.fspath(name_or_path)!r} (shipped: {', '.join(known) or 'none'}); "
            f"make one with: kvec calibrate {os.fspath(name_or_path)} --out FILE"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        return Calibration(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: not a calibration file of this version ({error})") from error


def shipped_folder() -> pathlib.Path:
    """Where the calibrations that come with the package are."""
    return pathlib.Path(__file__).parent.parent / "checkpoints"


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Writes a file at once, so that nobody sees half of it."""
    path = pathlib.Path(path)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
