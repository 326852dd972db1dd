"""From tensors in a file to a ``Transformer``: one tensor at a time, cast and written into stacked parameters.

A rule table says which tensor of the file is which parameter. Nothing is read before every name and shape is known
to fit; then each stacked parameter is allocated, filled in blocks of rows and handed to JAX before the next one, so
the peak is the model itself, its largest parameter and a few megabytes.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvec_jax.errors import LoadError
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Transformer
from kvec_jax.placement import place_parameter

_BLOCK_ELEMENTS = 1 << 22
_SHOWN_PROBLEMS = 20


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, unread.

    Attributes:
        shape: As stored; matrices are ``(out, in)``.
        read: ``read(start, stop)`` returns the rows ``[start, stop)`` as a numeric array.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one stored tensor, or some of its rows, becomes.

    Attributes:
        parameter: Dotted path in the ``Transformer``, e.g. ``"layers.q_proj"``.
        rows: The rows ``[start, stop)`` of the stored tensor; ``None`` means all.
        prepare: Applied to the whole part before it is written.
    """

    parameter: str
    rows: tuple[int, int] | None = None
    prepare: Callable[[np.ndarray], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Rules:
    """How a file format names its tensors.

    Attributes:
        table: Name, with ``{layer}`` for the layer's index, to the parts that it becomes.
        ignored: Regular expressions of names that are left out on purpose.
        prefix: Regular expression that is taken off the front of every name.
    """

    table: Mapping[str, tuple[Part, ...]]
    ignored: tuple[str, ...] = ()
    prefix: str = ""


@dataclasses.dataclass(frozen=True)
class _Write:
    """One part on its way into layer ``layer`` of a parameter (``None``: the parameter isn't stacked)."""

    layer: int | None
    tensor: StoredTensor
    part: Part


def load_weights(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    rules: Rules,
    dtype,
    where: str,
    mesh: jax.sharding.Mesh | None = None,
):
    """Reads ``tensors`` into a ``Transformer``.

    Args:
        config: Of the model; its parameters' shapes are what the file must have.
        tensors: What the file holds, by name.
        rules: Which tensor is which parameter.
        dtype: ``jnp.float32`` or ``jnp.bfloat16``, of the matrices; norms are float32.
        where: The file or folder, for messages.
        mesh: Devices that share the model.

    Returns:
        The ``Transformer``, on JAX's default device, or each parameter in pieces on those of the mesh.

    Raises:
        LoadError: With every missing, unexpected and misshapen tensor, or naming a file that can't be read.
    """
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, mesh=mesh))
    graph, state = nnx.split(abstract)
    flat = list(nnx.to_flat_state(state))
    expected = {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}
    writes = _plan(config, tensors, rules, expected, where)
    filled = []
    for path, leaf in flat:
        name = ".".join(map(str, path))
        placed = place_parameter(mesh, name, _fill(expected[name], writes.pop(name), _is_matrix(name)))
        filled.append((path, leaf.replace(placed)))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def resolve_dtype(dtype) -> jnp.dtype:
    """The dtype of a model's matrices: ``None`` means float32 on CPU and bfloat16 on an accelerator.

    Raises:
        ValueError: For anything but float32 and bfloat16.

    Example:
        >>> resolve_dtype("bfloat16")
        dtype(bfloat16)
    """
    if dtype is None:
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    try:
        resolved = jnp.dtype(dtype)
    except TypeError:
        resolved = None
    if resolved not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype: expected float32 or bfloat16, got {dtype!r}")
    return resolved


def _is_matrix(name: str) -> bool:
    """Whether the parameter is stored [in, out] here and (out, in) in files."""
    return name.endswith("_proj")


def _plan(config, tensors, rules: Rules, expected, where: str) -> dict[str, list[_Write]]:
    """Who writes what into each parameter; every mismatch is collected and raised at once."""
    compiled = [(re.compile(_as_regex(name)), parts) for name, parts in rules.table.items()]
    writes: dict[str, list[_Write]] = {name: [] for name in expected}
    problems = []
    for name, tensor in tensors.items():
        short = re.sub(f"^(?:{rules.prefix})", "", name) if rules.prefix else name
        if any(re.fullmatch(pattern, short) for pattern in rules.ignored):
            continue
        layer, parts = _match(short, compiled)
        if not parts or (layer or 0) >= config.num_hidden_layers or any(p.parameter not in writes for p in parts):
            problems.append(f"unexpected tensor {name}, of shape {list(tensor.shape)}")
            continue
        if tensor.shape != (wanted := _stored_shape(parts, expected)):
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(wanted)}")
        for part in parts:
            writes[part.parameter].append(_Write(layer, tensor, part))
    problems += _missing(config, rules, writes)
    if problems:
        shown = problems[:_SHOWN_PROBLEMS] + ["..."] * (len(problems) > _SHOWN_PROBLEMS)
        raise LoadError(f"{where}: {len(problems)} tensors don't fit the configuration:\n  " + "\n  ".join(shown))
    return writes


def _match(name: str, compiled) -> tuple[int | None, tuple[Part, ...]]:
    """The layer (``None``: no layer's) and the parts of the tensor ``name``; no parts where no rule has the name."""
    for regex, parts in compiled:
        if (match := regex.fullmatch(name)) is not None:
            layer = match.groupdict().get("layer")
            return None if layer is None else int(layer), parts
    return None, ()


def _as_regex(name: str) -> str:
    return re.escape(name).replace(re.escape("{layer}"), r"(?P<layer>\d+)")


def _stored_shape(parts: tuple[Part, ...], expected) -> tuple[int, ...]:
    """The shape that a file must give to the tensor with these parts; fused parts lie one below the other."""
    parameter, rows = parts[-1].parameter, parts[-1].rows
    shape = expected[parameter].shape
    shape = shape[1:] if parameter.startswith("layers.") else shape
    shape = shape[::-1] if _is_matrix(parameter) else shape
    return shape if rows is None else (rows[1], *shape[1:])


def _missing(config, rules: Rules, writes) -> Iterable[str]:
    """A line for each tensor that some parameter lacks, and for each that is there twice."""
    names = {part.parameter: name for name, parts in rules.table.items() for part in parts}
    for parameter, parts in writes.items():
        stacked = parameter.startswith("layers.")
        for layer in range(config.num_hidden_layers) if stacked else [None]:
            count = sum(write.layer == layer for write in parts)
            if count != 1:
                name = names.get(parameter, parameter).replace("{layer}", str(layer))
                yield f"missing tensor {name}" if count == 0 else f"tensor {name} is there {count} times"


def _fill(expected, writes: Iterable[_Write], transposed: bool) -> np.ndarray:
    """Reads one whole parameter."""
    target = _aligned_empty(expected.shape, expected.dtype)
    for write in writes:
        _write(target if write.layer is None else target[write.layer], write, transposed)
    return target


def _write(target: np.ndarray, write: _Write, transposed: bool) -> None:
    """Casts the part and writes it into ``target``, in blocks of rows."""
    start, stop = write.part.rows or (0, write.tensor.shape[0])
    step = max(1, _BLOCK_ELEMENTS // int(np.prod(write.tensor.shape[1:], dtype=np.int64)))
    if write.part.prepare is not None:
        step = stop - start
    for first in range(start, stop, step):
        last = min(first + step, stop)
        block = write.tensor.read(first, last)
        if write.part.prepare is not None:
            block = write.part.prepare(block)
        block = block.astype(target.dtype, copy=False)
        rows = slice(first - start, last - start)
        if transposed:
            target[:, rows] = block.T
        else:
            target[rows] = block


def _aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialised array at a multiple of 64 bytes, which JAX's CPU backend can take over without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    buffer = np.empty(size + 64, np.uint8)
    offset = -buffer.ctypes.data % 64
    return buffer[offset : offset + size].view(dtype).reshape(shape)


__all__ = ["Part", "Rules", "StoredTensor", "load_weights", "resolve_dtype"]
