"""Bytes that a kernel's grid moves, from its description alone: which blocks, and how often each is copied anew."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


@dataclasses.dataclass(frozen=True)
class Call:
    """One ``pallas_call`` of a function.

    Attributes:
        name: Of the kernel.
        steps: Of its grid.
        blocks: Shapes, inputs first.
        moved: Bytes of the blocks that are copied in and out. What stays in the chip's memory, for the kernel to copy
            by hand, isn't among them.
    """

    name: str
    steps: int
    blocks: tuple[tuple[int, ...], ...]
    moved: int


def calls_in(function: Callable, *arguments) -> list[Call]:
    """All kernels that a function of arrays calls."""
    return [_call(eqn.params) for eqn in _pallas_calls(jax.make_jaxpr(function)(*arguments).jaxpr)]


def _pallas_calls(jaxpr) -> Iterator:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from _pallas_calls(getattr(inner, "jaxpr", inner))


def _call(params) -> Call:
    mapping = params["grid_mapping"]
    blocks = tuple(map(_shape, mapping.block_mappings))
    moved = sum(_moved(block, mapping.grid) for block in mapping.block_mappings)
    return Call(params["name"], math.prod(mapping.grid), blocks, moved)


def _shape(block) -> tuple[int, ...]:
    return tuple(getattr(dim, "block_size", 1) for dim in block.block_shape)


def _moved(block, grid: tuple[int, ...]) -> int:
    if str(getattr(block.block_aval, "memory_space", None)) in ("any", "hbm"):
        return 0
    each = math.prod(_shape(block)) * block.array_aval.dtype.itemsize
    return each * _copies(block.index_map_jaxpr.jaxpr, grid)


def _copies(index_map, grid: tuple[int, ...]) -> int:
    """How often the block's index changes on the way through the grid, whose last axis goes fastest."""
    axes = {var: {axis} for axis, var in enumerate(index_map.invars[: len(grid)])}
    for eqn in index_map.eqns:
        depends = set().union(*(axes.get(var, set()) for var in eqn.invars if not isinstance(var, Literal)))
        axes.update(dict.fromkeys(eqn.outvars, depends))
    outputs = (var for var in index_map.outvars if not isinstance(var, Literal))
    innermost = max((axis for var in outputs for axis in axes.get(var, ()) if grid[axis] > 1), default=-1)
    return math.prod(grid[: innermost + 1])
