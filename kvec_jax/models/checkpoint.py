"""Saves a loaded model with orbax, and loads it again: parameters, configuration and tokenizer in one folder.

``parameters/`` is orbax's; ``kvec_model.json`` holds the configuration and the tokenizer's settings, and is written
last, so that a folder without it is not a checkpoint; ``tokenizer.json`` is in the usual format.
"""

import dataclasses
import json
import pathlib

import jax
from flax import nnx
from jax.sharding import Mesh

from kvec_jax.errors import LoadError
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.rope import Rope
from kvec_jax.models.tokenizer import Tokenizer
from kvec_jax.models.transformer import Transformer
from kvec_jax.models.weights import resolve_dtype
from kvec_jax.placement import check_mesh, parameter_sharding

SETTINGS = "kvec_model.json"
_FORMAT = 1


def save_checkpoint(path, model: Transformer, tokenizer: Tokenizer | None = None) -> None:
    """Writes ``model`` and ``tokenizer`` into the folder ``path``, which must not exist or be empty.

    Raises:
        FileExistsError: When there is something in it already.
    """
    import orbax.checkpoint

    folder = pathlib.Path(path).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder}: already there; a checkpoint is never overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "parameters", _by_name(model))
    settings = {"format": _FORMAT, "config": dataclasses.asdict(model.config), "tokenizer": None}
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
        settings["tokenizer"] = tokenizer.settings()
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")


def load_checkpoint(path, *, dtype=None, mesh: Mesh | None = None) -> tuple[Transformer, Tokenizer | None]:
    """Reads what ``save_checkpoint`` wrote.

    Args:
        path: The folder.
        dtype: Of the matrices, as for ``load_model``; it may differ from the one that was saved.
        mesh: As for ``load_model``.

    Raises:
        LoadError: When the folder isn't a checkpoint, or is damaged.
    """
    folder = pathlib.Path(path).expanduser().absolute()
    settings = _read_settings(folder)
    try:
        config = _config(settings["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{folder / SETTINGS}: the configuration is damaged ({error})") from error
    mesh = None if mesh is None else check_mesh(mesh, config)
    model = _restore(folder / "parameters", config, resolve_dtype(dtype), mesh)
    tokenizer = None
    if settings.get("tokenizer") is not None:
        tokenizer = Tokenizer.from_file(folder / "tokenizer.json", **settings["tokenizer"])
    return model, tokenizer


def _by_name(model: Transformer) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def _restore(folder: pathlib.Path, config: ModelConfig, dtype, mesh: Mesh | None) -> Transformer:
    import orbax.checkpoint

    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, mesh=mesh))
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=parameter_sharding(mesh, name))
        for name, leaf in _by_name(abstract).items()
    }
    try:
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            _compare(folder, checkpointer.metadata(folder).item_metadata, wanted)
            values = checkpointer.restore(folder, wanted)
    except LoadError:
        raise
    except Exception as error:  # orbax and its storage raise many kinds
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LoadError(f"{folder}: the checkpoint is damaged ({first})") from error
    graph, state = nnx.split(abstract)
    flat = [(path, leaf.replace(values[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _compare(folder: pathlib.Path, stored, wanted: dict) -> None:
    """Raises for every parameter that is missing, too much, or of another shape."""
    if stored is None:
        raise LoadError(f"{folder}: the checkpoint is damaged (no parameters in it)")
    found = {name: tuple(entry.shape) for name, entry in stored.tree.items()}
    expected = {name: leaf.shape for name, leaf in wanted.items()}
    problems = [
        f"{name}: expected {list(expected.get(name, ()))}, got {list(found.get(name, ()))}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if problems:
        raise LoadError(f"{folder}: parameters don't fit the configuration:\n  " + "\n  ".join(problems))


def _read_settings(folder: pathlib.Path) -> dict:
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        form = settings["format"]
    except OSError as error:
        raise LoadError(f"{folder}: not a checkpoint (no readable {SETTINGS})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{path}: damaged ({error!r})") from error
    if form != _FORMAT:
        raise LoadError(f"{path}: written in format {form!r}; this version reads format {_FORMAT}")
    return settings


def _config(values: dict) -> ModelConfig:
    """The dataclass from its JSON: lists become tuples, RoPE settings become ``Rope``."""

    def hashable(value):
        return tuple(value) if isinstance(value, list) else value

    fields = {key: hashable(value) for key, value in values.items()}
    for key in ("rope", "local_rope"):
        if fields[key] is not None:
            fields[key] = Rope(**{name: hashable(value) for name, value in fields[key].items()})
    return ModelConfig(**fields)


__all__ = ["SETTINGS", "load_checkpoint", "save_checkpoint"]
