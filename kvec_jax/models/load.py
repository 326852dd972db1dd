"""From a name or a path to a model and its tokenizer."""

import contextlib
import dataclasses
import os
import pathlib
import re

import jax

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models import gguf, huggingface, sources
from kvec_jax.models.checkpoint import SETTINGS, load_checkpoint
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.gguf_file import read_gguf
from kvec_jax.models.json_file import read_object
from kvec_jax.models.registry import KNOWN_MODELS
from kvec_jax.models.safetensors_file import read_folder
from kvec_jax.models.tokenizer import Tokenizer
from kvec_jax.models.transformer import Transformer
from kvec_jax.models.weights import load_weights, resolve_dtype
from kvec_jax.placement import check_mesh


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: Its parameters and configuration.
        tokenizer: ``None`` for a folder without ``tokenizer.json``.
        name: What was asked for.
    """

    model: Transformer
    tokenizer: Tokenizer | None
    name: str


def load_model(
    name_or_path: str | os.PathLike,
    *,
    dtype=None,
    revision: str | None = None,
    token: str | bool | None = None,
    max_context: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> LoadedModel:
    """Loads a model and its tokenizer.

    Args:
        name_or_path: A known name (``"smollm2-135m"``), a folder with ``config.json`` and safetensors, a ``.gguf``
            file, a folder written by ``save_checkpoint``, or a repository on the Hugging Face hub
            (``"Qwen/Qwen3-0.6B"``).
        dtype: Of the matrices: float32 or bfloat16, as a string or dtype. ``None`` means float32 on CPU and bfloat16
            on an accelerator. Norms are float32.
        revision: Branch, tag or commit on the hub.
        token: For the hub; ``None`` takes the one stored by ``hf auth login``.
        max_context: Shortens the context. LongRoPE models (Phi-3) have one set of frequencies for their original
            context and one for the long; the context decides which is taken, for all positions.
        mesh: Devices that share the model, see ``kvec_jax.shard``: each gets its piece of a parameter as that is read.
            ``None`` means JAX's default device.

    Returns:
        The model, its tokenizer and its name.

    Raises:
        LoadError: When nothing is found, or a file is damaged or doesn't fit its configuration.
        UnsupportedError: When the model asks for something that isn't done here.
        ValueError: For another dtype, a context out of range, or a mesh that can't share the model.
    """
    dtype = resolve_dtype(dtype)
    if not isinstance(name_or_path, str | os.PathLike):
        raise TypeError(f"name_or_path: expected a model's name or path, got {name_or_path!r}")
    name = os.fspath(name_or_path)
    path = _locate(name, revision, token)
    if (path / SETTINGS).is_file():
        if max_context is not None:
            raise ValueError("max_context: a checkpoint keeps the context with which its model was loaded")
        model, tokenizer = load_checkpoint(path, dtype=dtype, mesh=mesh)
        return LoadedModel(model, tokenizer, name)
    if path.is_dir():
        config, tensors, rules, tokenizer = _open_folder(path, max_context)
    else:
        config, tensors, rules, tokenizer = _open_gguf(path, max_context)
    mesh = None if mesh is None else check_mesh(mesh, config)
    return LoadedModel(load_weights(config, tensors, rules, dtype, str(path), mesh), tokenizer, name)


def load_config(name_or_path: str | os.PathLike, **options) -> ModelConfig:
    """Shape and features of a model, without its weights (a known name or one of the hub is fetched if it isn't here).

    Args:
        name_or_path: As for ``load_model``, but no checkpoint folder.
        **options: ``revision`` and ``token``, as for ``load_model``.

    Raises:
        LoadError, UnsupportedError: As for ``load_model``.
    """
    path = _locate(os.fspath(name_or_path), options.get("revision"), options.get("token"))
    return (_open_folder if path.is_dir() else _open_gguf)(path, None)[0]


def _locate(name: str, revision, token) -> pathlib.Path:
    """The file or folder that ``name`` means."""
    if not name:
        raise LoadError(f"expected a model's name or path, got ''; known models: {', '.join(KNOWN_MODELS)}")
    path = pathlib.Path(name).expanduser()
    if name in KNOWN_MODELS and not path.exists():
        return sources.find_model(name, revision=revision, token=token)
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"{path}: expected a folder or a .gguf file")
        return path
    looks_local = path.suffix in (".gguf", ".safetensors", ".json") or path.is_absolute() or name.startswith((".", "~"))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not looks_local:
        try:
            return sources.hub_folder(name, revision=revision, token=token)
        except LoadError as error:
            raise LoadError(
                f"{name}: no such folder here, and it can't be had from the Hugging Face hub: {error}"
            ) from error
    raise LoadError(f"{name}: no such file or folder; known models: {', '.join(KNOWN_MODELS)}")


def _open_gguf(path: pathlib.Path, max_context):
    file = read_gguf(path)
    config = gguf.config_from_gguf(file)
    if max_context is not None:
        config = config.with_context(max_context)
    with _naming(path):
        tokenizer = Tokenizer.from_gguf(file.metadata)
    return config, file.tensors, gguf.gguf_rules(config), tokenizer


def _open_folder(folder: pathlib.Path, max_context):
    settings = read_object(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_object(generation_file) if generation_file.is_file() else None
    with _naming(folder / "config.json"):
        config = huggingface.config_from_hf(settings, generation, max_context=max_context)
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(folder, config.eos_token_ids, config.bos_token_id)
    return config, read_folder(folder), huggingface.hf_rules(config), tokenizer


@contextlib.contextmanager
def _naming(path: pathlib.Path):
    """Puts the file's name in front of errors that don't know it."""
    try:
        yield
    except (LoadError, UnsupportedError) as error:
        raise type(error)(f"{path}: {error}") from error


__all__ = ["LoadedModel", "load_config", "load_model"]
