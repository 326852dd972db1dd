"""Contexts as files: safetensors, with the rest as JSON in its header, and a checksum over every byte.

The checksum stands in the header too; it is that of the file with zeros in its place. So whatever bit of a file is
flipped, its header included, is noticed before anything in it is believed.
"""

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.cache import CompressedKV
from kvec_jax.contexts import Context
from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.files import replacing
from kvec_jax.identity import ModelIdentity
from kvec_jax.quantised import RowScales
from kvec_jax.regroup import regroup

_FORMAT = "kvec_jax context 1"
_NO_CHECKSUM = "0" * 64
_PIECE = 1 << 24


def save_context(context: Context, path: str | os.PathLike) -> None:
    """``Context.save``."""
    import safetensors.numpy

    import kvec_jax

    if context.cache.beyond is not None:
        raise UnsupportedError(
            f"{path}: a context with spans on the host can't be saved, only one of rows that were chosen"
        )
    cache = regroup(context.cache, None)  # a file says nothing of devices
    tensors = _arrays(cache) | {f"scales.{name}": array for name, array in _arrays(cache.scales).items()}
    about = {
        "model": dataclasses.asdict(context.model),
        "policy": context.policy,
        "document_tokens": context.document_tokens,
        "chat": context.chat,
        "segment_rows": cache.segment_rows,
        "bits": cache.scales.bits if cache.scales else None,
        "versions": {"kvec_jax": kvec_jax.__version__, "jax": jax.__version__, "numpy": np.__version__},
    }
    header = {"format": _FORMAT, "sha256": _NO_CHECKSUM, "context": json.dumps(about)}
    with replacing(path) as unfinished:
        safetensors.numpy.save_file(tensors, unfinished, header)
        with open(unfinished, "rb+") as file, mmap.mmap(file.fileno(), 0) as content:
            place = content.find(f'"sha256":"{_NO_CHECKSUM}"'.encode()) + len('"sha256":"')
            content[place : place + len(_NO_CHECKSUM)] = _checksum(content, place).encode()


def load_context(path: str | os.PathLike, lm) -> Context:
    """Reads a context that ``Context.save`` wrote.

    The file is mapped into memory; its checksum is computed from there, and its arrays are copied from there to the
    device, one at a time.

    Args:
        path: The file.
        lm: The ``LanguageModel`` that read the document, loaded with the same dtype.

    Returns:
        The context; its policy is known by name only.

    Raises:
        LoadError: If there is no such file, it is no context, is damaged, or belongs to another model. The message
            begins with the path.
        TypeError: If ``lm`` is no ``LanguageModel``.
    """
    import safetensors

    if not isinstance(getattr(lm, "identity", None), ModelIdentity):
        raise TypeError(f"lm: expected the model that kvec_jax.load gives, got {type(lm).__name__}")
    path = pathlib.Path(path)
    with _errors_naming(path):
        about = _read_about(path)
        with safetensors.safe_open(path, "np") as tensors:
            arrays = {name: jnp.asarray(tensors.get_tensor(name)) for name in tensors.keys()}
        scales = {name: arrays.pop(name) for name in list(arrays) if name.startswith("scales.")}
        if scales:
            fields = {name.removeprefix("scales."): array for name, array in scales.items()}
            arrays["scales"] = RowScales(**fields, bits=about["bits"])
        context = Context(
            cache=CompressedKV(**arrays, segment_rows=about["segment_rows"]),
            document_tokens=about["document_tokens"],
            policy=about["policy"],
            model=ModelIdentity(**about["model"]),
            chat=about["chat"],
        )
    try:
        context.model.check(lm.identity)
    except ValueError as error:
        raise LoadError(f"{path}: {error}") from error
    return dataclasses.replace(context, cache=regroup(context.cache, lm.model.mesh))


def _arrays(fields) -> dict[str, np.ndarray]:
    """The arrays among a dataclass's fields, by name; none of ``None``."""
    values = {} if fields is None else vars(fields)
    return {name: np.asarray(value) for name, value in values.items() if isinstance(value, jax.Array)}


def read_identity(path: str | os.PathLike) -> ModelIdentity:
    """The model that a file's context belongs to; errors as for ``load_context``."""
    path = pathlib.Path(path)
    with _errors_naming(path):
        return ModelIdentity(**_read_about(path)["model"])


@contextlib.contextmanager
def _errors_naming(path: pathlib.Path):
    """Turns whatever a damaged or foreign file leads to into a ``LoadError`` that begins with its path."""
    import safetensors

    damage = (ValueError, LookupError, TypeError, AttributeError, RecursionError, safetensors.SafetensorError)
    try:
        yield
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"{path}: can't be read ({error.strerror or error})") from error
    except damage as error:
        raise LoadError(f"{path}: no context of this version ({error or type(error).__name__})") from error


def _read_about(path: pathlib.Path) -> dict:
    """What the header says beside the arrays, once all bytes are known to be as they were written."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        length = int.from_bytes(content[:8], "little")
        if len(content) < 8 or length > len(content) - 8:
            raise LoadError(f"{path}: cut off, or no context (the header's length is wrong)")
        header = json.loads(content[8 : 8 + length])["__metadata__"]
        if not header["format"].startswith(_FORMAT.rstrip("0123456789")):
            raise LoadError(f"{path}: no context, but {header['format']!r}")
        if header["format"] != _FORMAT:
            raise LoadError(f"{path}: written in the format {header['format']!r}; this version reads {_FORMAT!r}")
        if _checksum(content, content.find(header["sha256"].encode())) != header["sha256"]:
            raise LoadError(f"{path}: damaged (its checksum is wrong)")
        return json.loads(header["context"])


def _checksum(content: mmap.mmap, place: int) -> str:
    """SHA-256 of the content with zeros for the 64 characters at ``place``."""
    digest = hashlib.sha256(content[:place] + _NO_CHECKSUM.encode())
    with memoryview(content) as view:
        for start in range(place + len(_NO_CHECKSUM), len(view), _PIECE):
            digest.update(view[start : start + _PIECE])
    return digest.hexdigest()
