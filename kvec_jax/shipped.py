"""Small files that come with the package, one for each of some models: calibrations and zoom-in heads."""

import os
import pathlib

from kvec_jax.errors import LoadError
from kvec_jax.models.registry import KNOWN_MODELS


def find_file(name_or_path: str | os.PathLike, suffix: str, what: str, command: str) -> pathlib.Path:
    """The file that is meant by a path, or by the name of a model for which one is shipped.

    Args:
        name_or_path: Either.
        suffix: Of shipped files, after the model's name.
        what: What is looked for, in words.
        command: How to make one, with ``{}`` for the model.

    Raises:
        LoadError: If there is none; it names the command.
    """
    path, name = pathlib.Path(name_or_path), os.fspath(name_or_path)
    if path.is_file():
        return path
    path = shipped_folder() / f"{known_name(name) or name}{suffix}"
    if path.is_file():
        return path
    shipped = sorted(file.name.removesuffix(suffix) for file in shipped_folder().glob(f"*{suffix}"))
    raise LoadError(
        f"no {what} for {name!r} (shipped: {', '.join(shipped) or 'none'}); make one with: {command.format(name)}"
    )


def shipped_folder() -> pathlib.Path:
    """Where the files that come with the package are: inside it, or beside it where it is a source checkout."""
    package = pathlib.Path(__file__).parent
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
