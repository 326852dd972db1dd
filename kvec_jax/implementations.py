"""Which implementation each operation takes, decided once, where a user calls."""

import dataclasses

import jax

from kvec_jax.errors import UnsupportedError
from kvec_jax.pallas.compat import default_platform
from kvec_jax.pallas.dispatch import KERNELS, check_implementation
from kvec_jax.typing import Implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementations:
    """How each operation is carried out: ``None``, ``"xla"``, ``"pallas_tpu"`` or ``"pallas_gpu"``.

    ``None`` takes the platform's kernel where there is one that supports the case, and plain XLA otherwise. A name
    never falls back. ``ragged_attention`` has a second kernel for Hopper GPUs, ``"mosaic_gpu"``, for bfloat16 and head
    sizes of 64, 128 and 256.

    Args:
        prompt_attention: Attention of a prompt over itself.
        window_scores: What the last queries of a prompt say about its keys.
        value_norms: Norm of what each entry's value adds to the output.
        select_top_k: Selection of the best entries.
        pack_rows: Copying the chosen entries into the cache.
        ragged_attention: Attention of new tokens over the packed cache.
        interpret: Whether kernels are interpreted rather than compiled; ``None`` means that they are on a CPU.

    Raises:
        ValueError: For an unknown implementation.

    Example:
        >>> Implementations(select_top_k="pallas_gpu").select_top_k
        'pallas_gpu'
    """

    prompt_attention: Implementation = None
    window_scores: Implementation = None
    value_norms: Implementation = None
    select_top_k: Implementation = None
    pack_rows: Implementation = None
    ragged_attention: Implementation = None
    interpret: bool | None = None

    def __post_init__(self):
        for name in OPERATIONS:
            check_implementation(name, getattr(self, name))
        if self.interpret not in (None, True, False):
            raise ValueError(f"interpret: expected None, True or False, got {self.interpret!r}")


OPERATIONS = tuple(field.name for field in dataclasses.fields(Implementations) if field.name != "interpret")


def resolve(implementation: Implementation | Implementations, where=None) -> Implementations:
    """What a user's ``implementation`` means on the platform that the computation runs on.

    Args:
        implementation: One name for all operations, or one for each.
        where: Any pytree of arrays that the computation reads, such as the model: it runs where they are. A kernel that
            isn't asked for is not taken on a CPU, nor where the arrays are spread over several devices, but for a
            model on a mesh, of which each device runs its own part.

    Returns:
        With ``interpret`` decided: a hashable static argument.

    Raises:
        ValueError: For an unknown name.
        UnsupportedError: For a kernel of another platform that is to be compiled.

    Example:
        >>> resolve("pallas_tpu").interpret  # on a CPU
        True
    """
    if not isinstance(implementation, Implementations):
        check_implementation("implementation", implementation)
        implementation = Implementations(**dict.fromkeys(OPERATIONS, implementation))
    platform, devices = _placement(where)
    interpret = platform == "cpu" if implementation.interpret is None else implementation.interpret
    if implementation.interpret is None and not interpret:
        _check_platform(implementation, platform)
    changes = {}
    if devices > 1 or platform not in KERNELS:
        changes = {name: getattr(implementation, name) or "xla" for name in OPERATIONS}
    return dataclasses.replace(implementation, interpret=interpret, **changes)


def _placement(where) -> tuple[str, int]:
    """Platform, and number of devices, of the arrays in ``where``; the default where there are none or none yet."""
    for leaf in jax.tree.leaves(where):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            devices = leaf.devices()
            together = getattr(where, "mesh", None) is None
            return next(iter(devices)).platform, len(devices) if together else 1
    return default_platform(), 1


def _check_platform(implementation: Implementations, platform: str) -> None:
    for name in OPERATIONS:
        chosen = getattr(implementation, name)
        if chosen not in (None, "xla", KERNELS.get(platform), platform == "gpu" and "mosaic_gpu"):
            raise UnsupportedError(f"{name}: {chosen!r} is no kernel for this platform, {platform}")
