"""Compiled programs on a mesh of devices: each runs the whole program, on its own heads and rows of the batch."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from kvec_jax.models.config import ModelConfig, PartConfig
from kvec_jax.models.transformer import Transformer
from kvec_jax.part import DATA, TENSOR, Part
from kvec_jax.placement import axes_of, check_mesh, check_rows, on, place_parameter, rows_of, size_of, spec_of
from kvec_jax.sampling import keys_of_rows


def shard(model: Transformer, mesh: Mesh) -> Transformer:
    """The model with its parameters divided over a mesh of devices.

    Everything that takes the model runs on all of them then: heads are divided over the mesh's axis ``"tensor"``, the
    rows of a batch over ``"data"``; a mesh may have one axis or both. What is kept and generated is what one device
    keeps and generates, but for rounding. See ``docs/sharding.md``.

    Args:
        model: A model that lies on one device. (``kvec_jax.load`` puts each parameter where it belongs at once.)
        mesh: Of axes ``"data"`` and ``"tensor"``.

    Returns:
        A new model.

    Raises:
        TypeError: For anything but a model and a mesh.
        ValueError: For axes of other names; or if key-value heads, width, MLP or vocabulary can't be divided evenly.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvec_jax as kv
        >>> from kvec_jax.testing import tiny_model
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), devices=jax.devices()[:1])
        >>> model = kv.shard(tiny_model(), mesh)
        >>> _, cache = kv.prefill(model, jnp.arange(60)[None], jnp.array([60]), kv.LaProx(32))
        >>> cache.kept_positions(0)[3][1].size > 0
        True
    """
    from kvec_jax.checks import check_model  # which needs what is here

    check_model(model)
    mesh = check_mesh(mesh, model.config)
    graph, _ = nnx.split(abstract(model.config, model.dtype, mesh))
    flat = [
        (path, leaf.replace(place_parameter(mesh, ".".join(map(str, path)), leaf.get_value())))
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def on_mesh(function: Callable) -> Callable:
    """Lets a program, to be called under ``jit``, run on every device of the mesh that its model or its cache is on.

    Args:
        function: Of a ``model`` or a ``cache``, and of arrays by whose names ``placement`` knows their axes. Arguments
            without arrays are static. It is called as it is where there is no mesh.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        mesh = given["model" if "model" in given else "cache"].mesh
        return function(*args, **kwargs) if mesh is None else _spread(function, mesh, given)

    return run


def _spread(function: Callable, mesh: Mesh, given: dict[str, Any]) -> Any:
    arguments = {name: value for name, value in given.items() if _holds_arrays(value)}
    fixed = {name: value for name, value in given.items() if name not in arguments}
    rows = rows_of(arguments)
    divided = check_rows(mesh, rows)
    if divided and "key" in arguments and not arguments["key"].ndim:
        arguments["key"] = keys_of_rows(arguments["key"], rows)
    part = Part(heads=size_of(mesh, TENSOR), rows=size_of(mesh, DATA) if divided else 1)
    leaves, tree = jax.tree.flatten(_with_mesh(arguments, None))
    in_specs = [spec_of(mesh, path, x) for path, x in jax.tree.leaves_with_path(arguments)]

    @jax.jit  # so that both calls below trace it once
    def work(leaves):
        local = jax.tree.unflatten(tree, leaves)
        if "model" in local:
            local["model"] = _part_of(local["model"], part)
        return function(**local, **fixed)

    def everywhere(function, out_specs):
        return jax.shard_map(function, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)

    result = jax.eval_shape(everywhere(work, PartitionSpec()), leaves)  # shapes of what one device has
    out_specs = [on(mesh, axes_of(path, x.ndim), divided) for path, x in jax.tree.leaves_with_path(result)]
    found = everywhere(lambda leaves: jax.tree.leaves(work(leaves)), out_specs)(leaves)
    return _with_mesh(jax.tree.unflatten(jax.tree.structure(result), found), mesh)


def _holds_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


def _with_mesh(tree: Any, mesh: Mesh | None) -> Any:
    """The pytree with its caches said to be on ``mesh``."""
    from kvec_jax.cache import CompressedKV  # which needs what needs this

    def change(x):
        return dataclasses.replace(x, mesh=mesh) if isinstance(x, CompressedKV) else x

    return jax.tree.map(change, tree, is_leaf=lambda x: isinstance(x, CompressedKV))


def _part_of(model: Transformer, part: Part) -> Transformer:
    """What one device has of a model, from a whole model's structure with that device's arrays in it."""
    config = PartConfig.of(model.config, part)
    return jax.tree.unflatten(_structure(config, model.dtype), jax.tree.leaves(model))


@functools.lru_cache
def _structure(config: ModelConfig, dtype):
    return jax.tree.structure(abstract(config, dtype))


def abstract(config: ModelConfig, dtype, mesh: Mesh | None = None) -> Transformer:
    """A model of shapes and types alone."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, mesh=mesh))
