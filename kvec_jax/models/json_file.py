"""The JSON files of a model's folder."""

import json
import pathlib

from kvec_jax.errors import LoadError


def read_object(path: pathlib.Path) -> dict:
    """The JSON object in ``path``.

    Raises:
        LoadError: When there is no such file, or something else is in it.
    """
    if not path.is_file():
        raise LoadError(f"{path.parent}: no {path.name} in this folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path}: expected a JSON object")
    return content
