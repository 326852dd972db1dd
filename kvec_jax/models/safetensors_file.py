"""Reads safetensors files, single or in shards: tensors stay unread until asked for, a few rows at a time.

The files are read and not memory-mapped, so that a model's file doesn't stay in memory beside the model.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib

import ml_dtypes
import numpy as np

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models.weights import StoredTensor

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_KNOWN_ELSEWHERE = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2", "F4", "F8_E8M0")
_LONGEST_HEADER = 100 << 20


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lies, and what an element is."""

    path: pathlib.Path
    name: str
    dtype: np.dtype
    offset: int
    row_shape: tuple[int, ...]


def read_folder(folder) -> dict[str, StoredTensor]:
    """The tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    Raises:
        LoadError: When there is neither, or a file is missing, cut off or damaged.
        UnsupportedError: When a tensor is stored in a dtype that can't be read.
    """
    folder = pathlib.Path(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return _read_shards(folder, index)
    if single.is_file():
        return read_safetensors(single)
    raise LoadError(f"{folder}: no model.safetensors or model.safetensors.index.json in this folder")


def read_safetensors(path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name; errors as for ``read_folder``."""
    path = pathlib.Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise LoadError(f"{path}: cut off or not a safetensors file (the header's length is wrong)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise LoadError(f"{path}: can't be read ({error.strerror})") from error
    except ValueError as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(f"{path}: the header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise LoadError(f"{path}: the header is not a JSON object")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _tensor(path, name, entry, 8 + length, size) for name, entry in entries.items()}


def _read_shards(folder: pathlib.Path, index: pathlib.Path) -> dict[str, StoredTensor]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(places.values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index}: not a readable index ({error!r})") from error
    if missing:
        raise LoadError(f"{index} names files that are not there: {', '.join(missing)}")
    tensors = {shard: read_safetensors(folder / shard) for shard in shards}
    absent = [f"{name} in {shard}" for name, shard in places.items() if name not in tensors[shard]]
    if absent:
        raise LoadError(f"{index} names tensors that are not there: {', '.join(absent[:20])}")
    return {name: tensors[shard][name] for name, shard in places.items()}


def _tensor(path: pathlib.Path, name: str, entry, start: int, size: int) -> StoredTensor:
    try:
        stored, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(isinstance(n, int) and n >= 0 for n in (*shape, first, last))
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{path}: the header's entry for {name} is damaged ({error!r})") from error
    if stored in _KNOWN_ELSEWHERE:
        raise UnsupportedError(f"{path}: tensor {name} is stored as {stored}; known: {', '.join(_DTYPES)}")
    if stored not in _DTYPES:
        raise LoadError(f"{path}: tensor {name} has the unknown dtype {stored!r}; known: {', '.join(_DTYPES)}")
    dtype = np.dtype(_DTYPES[stored])
    if not whole or last - first != math.prod(shape) * dtype.itemsize:
        raise LoadError(f"{path}: the header's entry for {name} is damaged: {entry}")
    if start + last > size:
        raise LoadError(f"{path}: cut off: tensor {name} ends at byte {start + last}, the file at {size}")
    place = _Place(path, name, dtype, start + first, shape[1:])
    return StoredTensor(shape, functools.partial(_read, place))


def _read(place: _Place, first: int, last: int) -> np.ndarray:
    row = math.prod(place.row_shape)
    offset, count = place.offset + first * row * place.dtype.itemsize, (last - first) * row
    # Read as bytes: numpy can't read bfloat16 from a file by itself.
    raw = np.fromfile(place.path, np.uint8, count * place.dtype.itemsize, offset=offset)
    if raw.size != count * place.dtype.itemsize:
        raise LoadError(f"{place.path}: cut off within tensor {place.name}")
    return raw.view(place.dtype).reshape(last - first, *place.row_shape)


__all__ = ["read_folder", "read_safetensors"]
