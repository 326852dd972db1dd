"""Moves a cache from one device to several, or back: the kept rows, head by head, into the pools of their devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvec_jax.cache import CompressedKV
from kvec_jax.errors import UnsupportedError
from kvec_jax.part import TENSOR
from kvec_jax.placement import place_cache, size_of, whole


def regroup(cache: CompressedKV, mesh: Mesh | None) -> CompressedKV:
    """The cache on a ``mesh``, or on JAX's default device; by way of the host's memory.

    Each pool gets as many rows as the fullest of them needs.

    Args:
        cache: Of chosen rows.
        mesh: As a model's, see ``kvec_jax.shard``; ``None`` for one device.

    Raises:
        UnsupportedError: For a cache of a form of its own.
    """
    if cache.mesh == mesh:
        return cache
    if cache.beyond is not None:
        raise UnsupportedError(f"a cache with {type(cache.beyond).__name__} can't be moved between devices")
    devices = 1 if mesh is None else size_of(mesh, TENSOR)
    counts = whole(cache.counts)
    B, L, K = counts.shape
    sizes = np.full_like(counts, cache.segment_rows) if cache.segment_rows else counts
    old = whole(cache.starts) + cache.first_rows

    def by_device(x):  # [B, L, K] to [B, devices, L * K / devices]
        return x.reshape(B, L, devices, -1).swapaxes(1, 2).reshape(B, devices, -1)

    grouped = by_device(sizes)
    starts = np.cumsum(grouped, axis=-1) - grouped
    index = np.zeros((B, devices, grouped.sum(axis=-1).max()), np.int64)
    for place, first, size, source in zip(np.ndindex(starts.shape), starts.flat, grouped.flat, by_device(old).flat):
        index[place[:2]][first : first + size] = source + np.arange(size)
    index = index.reshape(B, -1)
    starts = starts.reshape(B, devices, L, -1).swapaxes(1, 2).reshape(B, L, K)

    def take(x):
        x = whole(x)
        return np.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)

    moved = dict(keys=take(cache.keys), values=take(cache.values), positions=take(cache.positions))
    scales = cache.scales
    if scales is not None:
        by_row = dict(value_scale=take(scales.value_scale), value_zero=take(scales.value_zero))
        scales = dataclasses.replace(scales, **by_row)
    fields = dataclasses.replace(cache, **moved, starts=starts.astype(np.int32), scales=scales, mesh=mesh)
    arrays = jax.tree.map(whole, fields)
    return jax.tree.map(jnp.asarray, arrays) if mesh is None else place_cache(arrays)
