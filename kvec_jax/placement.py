"""Where the arrays of models and caches lie on a mesh of devices: which of their axes are divided, and over what."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kvec_jax.models.config import ModelConfig
from kvec_jax.part import DATA, TENSOR
from kvec_jax.typing import Array

# Axes of arrays by name; what is neither here nor a parameter has the rows of the batch first. Each device has a pool
# of its own, with the rows of its heads: ``starts`` count in that.
_AXES = {
    "keys": (DATA, TENSOR),
    "values": (DATA, TENSOR),
    "positions": (DATA, TENSOR),
    "starts": (DATA, None, TENSOR),
    "counts": (DATA, None, TENSOR),
    "tail_keys": (None, DATA, TENSOR),
    "tail_values": (None, DATA, TENSOR),
    "recent": (None, DATA, TENSOR),
    "key_scale": (DATA, None, TENSOR),
    "key_zero": (DATA, None, TENSOR),
    "value_scale": (DATA, TENSOR),
    "value_zero": (DATA, TENSOR),
}


def parameter_axes(name: str) -> tuple[str | None, ...]:
    """Axes of a model's parameter: matrices are divided by columns, embeddings by rows, norms not at all."""
    if name in ("embedding", "lm_head"):
        return (TENSOR, None)
    if name.endswith("_proj"):
        return (None, None, TENSOR)
    return (None, TENSOR) if name.endswith("_bias") else ()


def axes_of(path: tuple, ndim: int) -> tuple[str | None, ...]:
    """Axes of an array of ``ndim`` axes at a ``path`` of a pytree of arguments or results, by the names on the way."""
    names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
    if names[:1] == ["model"]:
        return next(filter(None, (parameter_axes(name) for name in names if isinstance(name, str))), ())
    if "prepared" in names:  # each device's own, side by side; the first axis is that of the layers
        return (None, TENSOR) if ndim > 1 else (TENSOR,)
    known = next((_AXES[name] for name in names if name in _AXES), (DATA,))
    return known if ndim else ()


def on(mesh: Mesh, axes: tuple[str | None, ...], rows_divided: bool = True) -> PartitionSpec:
    """The axes as JAX writes them, without those over which the ``mesh`` divides nothing."""
    there = {axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and (rows_divided or axis != DATA)}
    spec = [axis if axis in there else None for axis in axes]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def spec_of(mesh: Mesh, path: tuple, x: Array) -> PartitionSpec:
    """How a whole array at a ``path`` is divided; one row of a batch is not, every device along ``"data"`` has it."""
    axes = axes_of(path, x.ndim)
    return on(mesh, axes, DATA not in axes or x.shape[axes.index(DATA)] > 1)


def rows_of(arguments: dict[str, Any]) -> int:
    """Rows of the batch that a program's arguments hold; 1 where none has any."""
    found = [(axes_of(path, x.ndim), x.shape) for path, x in jax.tree.leaves_with_path(arguments)]
    return max((shape[axes.index(DATA)] for axes, shape in found if DATA in axes), default=1)


def size_of(mesh: Mesh, axis: str) -> int:
    """Devices along an axis; 1 where the mesh has none of that name."""
    return mesh.shape.get(axis, 1)


def check_mesh(mesh: Any, config: ModelConfig) -> Mesh:
    """The mesh, of which it is known that it can share a model of this ``config``.

    Raises:
        TypeError: If it is no mesh.
        ValueError: For axes of other names, or numbers that can't be divided.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {mesh!r}")
    unknown = set(mesh.axis_names) - {DATA, TENSOR}
    if unknown:
        raise ValueError(f"mesh: expected axes 'data' and 'tensor', one or both, got {mesh.axis_names}")
    devices = size_of(mesh, TENSOR)
    for name in ("num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size"):
        size = getattr(config, name)
        if size % devices:
            raise ValueError(f"mesh: {name} = {size} can't be divided among {devices} devices (the axis 'tensor')")
    return Mesh(mesh.devices, mesh.axis_names)  # whatever types its axes had


def check_rows(mesh: Mesh | None, rows: int) -> bool:
    """Whether the rows of a batch are divided over a ``mesh``; a single row is every device's.

    Raises:
        ValueError: If they can't be divided evenly.
    """
    devices = 1 if mesh is None else size_of(mesh, DATA)
    if rows > 1 and rows % devices:
        raise ValueError(
            f"batch: expected one row, or a multiple of {devices} (devices along the mesh's axis 'data'), got {rows}"
        )
    return rows > 1 and devices > 1


def parameter_sharding(mesh: Mesh | None, path: str) -> Sharding:
    """Where a parameter lies, by its dotted path: on the first device, or in pieces on those of a ``mesh``."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, on(mesh, parameter_axes(path.rpartition(".")[2])))


def place_parameter(mesh: Mesh | None, path: str, values: np.ndarray | Array) -> Array:
    """A parameter, by its dotted path, on the default device or in pieces on those of a ``mesh``."""
    if mesh is None:
        return jax.device_put(values)
    sharding = parameter_sharding(mesh, path)
    if isinstance(values, jax.Array) and not mesh.is_multi_process:
        return jax.device_put(values, sharding)
    return _in_pieces(np.asarray(values), sharding)


def _in_pieces(values: np.ndarray, sharding: Sharding) -> Array:
    """An array of which this host has all; of several hosts each places the pieces of its own devices."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def place_rows(mesh: Mesh | None, **arrays) -> tuple[Array, ...]:
    """What a program is given beside model and cache, by name, where the ``mesh`` wants it."""
    if mesh is None or any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
        return tuple(arrays.values())
    check_rows(mesh, rows_of(arrays))

    def put(path, x):
        sharding = NamedSharding(mesh, spec_of(mesh, path, x))
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return _in_pieces(np.asarray(x), sharding)
        data = _in_pieces(np.asarray(jax.random.key_data(x)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))

    return tuple(jax.tree_util.tree_map_with_path(put, arrays)[name] for name in arrays)


def place_cache(cache):
    """A cache, on whose arrays something was done on the host, with each of them where its mesh wants it."""
    mesh = cache.mesh
    if mesh is None:
        return cache
    check_rows(mesh, cache.tail_length.shape[0])

    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(x, NamedSharding(mesh, spec_of(mesh, path, x))), cache
    )


def whole(x: Array | np.ndarray) -> np.ndarray:
    """An array in the memory of this host. All hosts that have pieces of it must ask for it together."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
