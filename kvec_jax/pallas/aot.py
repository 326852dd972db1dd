"""Compiles for chips that this machine doesn't have: the chip's own compiler runs, the program doesn't.

``libtpu`` (in ``jax[tpu]``) holds the whole compiler for TPUs, JAX's CUDA plugin that for NVIDIA GPUs. Neither needs
the chip: a description of it is enough. What they refuse (tiles that don't fit, memory that isn't there, operations
that don't exist) they refuse here too; that a program compiles says nothing about its speed.

Set ``JAX_PLATFORMS=cpu`` before JAX is imported: with ``libtpu`` or the plugin installed, JAX would otherwise look for
the chips themselves, and complain. What ``libtpu`` reads when it is loaded is set here; ``LIBTPU_INIT_ARGS`` must be in
the environment before the first call.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

import jax
from jax.experimental import topologies
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

# Read by libtpu when it is loaded. Without the second, two processes can't compile at a time.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

# What XLA asks of a device, with the figures of NVIDIA's data sheet and its CUDA programming guide for the H100 SXM.
_H100 = """
device_description_str: "NVIDIA H100 80GB HBM3"
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 85899345920
  memory_bandwidth: 3350000000000
}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A chip to compile for.

    Attributes:
        platform: ``"tpu"`` or ``"cuda"``.
        topology: Arguments of JAX's ``get_topology_desc``: as few chips as there may be.
        cores: That one program runs on.
        options: Of the compiler.
    """

    platform: str
    topology: dict[str, str]
    cores: int
    options: dict[str, str | int] = dataclasses.field(default_factory=dict)


CHIPS = {
    "v5e": Chip(platform="tpu", topology={"topology_name": "v5e:2x2"}, cores=1),
    "v5p": Chip(platform="tpu", topology={"topology_name": "v5p:2x2x1"}, cores=2),
    "v6e": Chip(platform="tpu", topology={"topology_name": "v6e:2x2"}, cores=1),
    # To choose between algorithms by their times would need the chip.
    "h100": Chip(
        platform="cuda",
        topology={"target_config": _H100, "topology": "1x1x1"},
        cores=132,
        options={"xla_gpu_autotune_level": 0},
    ),
}


def compile_for(chip: str, function: Callable, *arguments, donate_argnums: Sequence[int] = ()) -> jax.stages.Compiled:
    """Compiles a function for a chip, which need not be here.

    Args:
        chip: ``"v5e"``, ``"v5p"``, ``"v6e"`` or ``"h100"``.
        function: Of arrays. It must not ask which devices there are: name the implementations of operations.
        *arguments: Pytrees of arrays or ``jax.ShapeDtypeStruct``; only shapes and types are looked at, whether they
            lie in the host's memory (``pinned_host``), and how they are divided over a mesh that ``mesh_of`` gave.
        donate_argnums: Arguments whose memory the results may take.

    Returns:
        The compiled program, which can't be run here. ``memory_analysis()`` gives its bytes, ``as_text()`` its code.

    Raises:
        ValueError: For an unknown chip.
        ImportError: Without the chip's compiler; it says what to install.
        Exception: What the chip's compiler refuses, under JAX's names.

    Example:
        >>> compile_for("v4", lambda x: x + 1, jax.ShapeDtypeStruct((8, 128), "float32"))
        Traceback (most recent call last):
            ...
        ValueError: chip: expected 'v5e', 'v5p', 'v6e' or 'h100', got 'v4'
    """
    return lower_for(chip, function, *arguments, donate_argnums=donate_argnums).compile(_chip(chip).options)


def lower_for(chip: str, function: Callable, *arguments, donate_argnums: Sequence[int] = ()) -> jax.stages.Lowered:
    """``compile_for`` up to the point where the chip's compiler takes over; finds less, and takes less time."""
    device = device_of(chip)
    sharding = SingleDeviceSharding(device)

    def abstract(x):
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            return x
        on_host = getattr(getattr(x, "sharding", None), "memory_kind", None) == "pinned_host"
        where = sharding.with_memory_kind("pinned_host") if on_host else sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    with on_chip(chip):
        return jax.jit(function, donate_argnums=donate_argnums).lower(*jax.tree.map(abstract, arguments))


def on_chip(chip: str):
    """A context in which what asks for the chip's properties while it is traced is told those of ``chip``."""
    device = AbstractDevice(device_of(chip).device_kind, _chip(chip).cores, _chip(chip).platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@functools.cache
def device_of(chip: str) -> jax.Device:
    """A device that programs can be compiled for, and nothing else.

    Raises:
        ValueError, ImportError: As ``compile_for``.
    """
    described = _chip(chip)
    if described.platform == "tpu":
        _require_libtpu()
    try:
        return topologies.get_topology_desc(platform=described.platform, **described.topology).devices[0]
    except NotImplementedError as error:  # no plugin has registered the platform
        raise ImportError(
            "compiling for an NVIDIA GPU needs JAX's CUDA plugin: pip install 'kvec-jax[cuda]', or without libraries: "
            f"pip install --no-deps jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        ) from error


def mesh_of(chip: str, topology: str, shape: Sequence[int], axes: Sequence[str]) -> Mesh:
    """A mesh of TPUs that aren't here, to be compiled for.

    Args:
        chip: As for ``compile_for``.
        topology: How the chips are laid out, such as ``"4x4"``.
        shape: Of the mesh.
        axes: Its names.

    Raises:
        ValueError, ImportError: As ``compile_for``.
    """
    device_of(chip)  # sets what libtpu reads
    described = topologies.get_topology_desc(platform=_chip(chip).platform, topology_name=f"{chip}:{topology}")
    return Mesh(create_device_mesh(shape, described.devices, allow_split_physical_axes=True), tuple(axes))


def _require_libtpu() -> None:
    try:
        import libtpu  # noqa: F401
    except ImportError as error:
        raise ImportError("compiling for a TPU needs libtpu: pip install 'kvec-jax[tpu]'") from error
    for name, value in _LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _chip(name: str) -> Chip:
    if name not in CHIPS:
        raise ValueError(f"chip: expected 'v5e', 'v5p', 'v6e' or 'h100', got {name!r}")
    return CHIPS[name]
