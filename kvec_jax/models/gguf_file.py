"""Reads the GGUF container: metadata and tensors, unread until asked for.

The ``gguf`` package dequantises; its reader isn't used, because it takes 5 to 20 seconds for the vocabularies of
small models, where the loops below take a fraction of one.
"""

import dataclasses
import functools
import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models.weights import StoredTensor

_STRING, _ARRAY = 8, 9
# GGUF's value types, in the order of their numbers; strings and arrays are read by hand.
_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds: ``metadata`` by key (arrays as lists), and ``tensors`` by name."""

    path: pathlib.Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path) -> GgufFile:
    """Opens the GGUF file ``path``.

    Raises:
        LoadError: When it isn't a GGUF file, or ends too early.
        UnsupportedError: For a version or a quantisation that can't be read.
    """
    path = pathlib.Path(path)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (struct.error, IndexError, UnicodeDecodeError, ArithmeticError, TypeError, RecursionError) as error:
        raise LoadError(f"{path}: the GGUF header is damaged or cut off ({error})") from error
    except (OSError, ValueError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(f"{path}: can't be read ({error})") from error


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, format: str):
        (value,) = struct.unpack_from("<" + format, self.data, self.at)
        self.at += struct.calcsize("<" + format)
        return value

    def string(self) -> str:
        length = self.take("Q")
        if self.at + length > len(self.data):
            raise IndexError(f"a string of {length} bytes ends behind the file")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int):
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.take("I"), self.take("Q")
            if kind in (_STRING, _ARRAY):
                return [self.value(kind) for _ in range(count)]
            size = struct.calcsize("<" + _format(kind))
            if self.at + count * size > len(self.data):
                raise IndexError(f"an array of {count} values ends behind the file")
            values = struct.unpack_from(f"<{count}{_format(kind)}", self.data, self.at)
            self.at += count * size
            return list(values)
        return self.take(_format(kind))


def _format(kind: int) -> str:
    if kind not in _FORMATS:
        raise IndexError(f"unknown value type {kind}")
    return _FORMATS[kind]


def _parse(path: pathlib.Path, data) -> GgufFile:
    if data[:4] != b"GGUF":
        raise LoadError(f"{path}: not a GGUF file")
    cursor = _Cursor(data)
    cursor.at = 4
    version = cursor.take("I")
    if version not in (2, 3):
        raise UnsupportedError(f"{path}: GGUF version {version}; versions 2 and 3 can be read")
    tensor_count, value_count = cursor.take("Q"), cursor.take("Q")
    metadata = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.take("I"))
    found = []
    for _ in range(tensor_count):
        name = cursor.string()
        dimensions = [cursor.take("Q") for _ in range(cursor.take("I"))]
        found.append((name, tuple(reversed(dimensions)), cursor.take("I"), cursor.take("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _tensor(path, name, shape, kind, start + at, len(data)) for name, shape, kind, at in found}
    return GgufFile(path, metadata, tensors)


def _tensor(path, name: str, shape: tuple[int, ...], kind: int, offset: int, file_size: int) -> StoredTensor:
    import gguf

    if kind not in list(gguf.GGMLQuantizationType):
        raise UnsupportedError(f"{path}: tensor {name} has the unknown quantisation {kind}")
    quantisation = gguf.GGMLQuantizationType(kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    if not shape or shape[-1] % block:
        raise LoadError(f"{path}: tensor {name} of shape {list(shape)} doesn't consist of blocks of {block}")
    if len(shape) == 1 and block != 1:
        raise UnsupportedError(f"{path}: the vector {name} is quantised ({quantisation.name})")
    # The rows are those of the first axis, so that any tensor can be read a few rows at a time.
    rows, row_elements = shape[0], math.prod(shape[1:])
    row_bytes = row_elements // block * block_bytes
    end = offset + rows * row_bytes
    if end > file_size:
        raise LoadError(f"{path}: cut off: tensor {name} ends at byte {end}, the file at {file_size}")
    return StoredTensor(shape, functools.partial(_read, path, name, shape, quantisation, offset, row_bytes))


def _read(path, name: str, shape, quantisation, offset: int, row_bytes: int, first: int, last: int) -> np.ndarray:
    """Rows ``[first, last)``, dequantised to float32."""
    import gguf

    raw = np.fromfile(path, np.uint8, (last - first) * row_bytes, offset=offset + first * row_bytes)
    if raw.size != (last - first) * row_bytes:
        raise LoadError(f"{path}: cut off within tensor {name}")
    joined = _joined_rows(last - first, math.prod(shape[1:]))
    try:
        values = gguf.quants.dequantize(raw.reshape(-1, joined * row_bytes), quantisation)
    except NotImplementedError as error:
        raise UnsupportedError(f"{path}: tensor {name}: {quantisation.name} can't be dequantised") from error
    return values.reshape(last - first, *shape[1:])


def _joined_rows(rows: int, row_elements: int) -> int:
    """How many rows to pass to the ``gguf`` package as one: it takes few rows at a time, and short ones cost twice."""
    joined = 1
    while rows % (2 * joined) == 0 and 2 * joined * row_elements <= 1 << 15:
        joined *= 2
    return joined
