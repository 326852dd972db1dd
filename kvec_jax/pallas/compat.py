"""What differs between platforms and between versions of JAX: the only file that looks at either."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator

import jax

from kvec_jax.errors import UnsupportedError


def default_platform() -> str:
    """The platform that computations go to unless an array says otherwise: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device
    return device.platform if isinstance(device, jax.Device) else device or jax.default_backend()


@contextlib.contextmanager
def simulated_tpu(**options) -> Iterator[None]:
    """In it a TPU kernel runs in JAX's simulator of a TPU: races, and accesses out of bounds, are errors.

    One kernel at a time: JAX 0.10.2 remembers only whether the last one raced.

    Args:
        **options: Of ``pltpu.InterpretParams``.

    Raises:
        Exception: For an access out of bounds, or a race; which type is up to JAX's version.
    """
    from jax.experimental.pallas import tpu as pltpu  # slow to import, like all that need it: only where used

    fields = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    raises = "on_race" in fields  # from JAX 0.11 on, where that is the default
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, **options)):
            yield
        if not raises and _last_kernel_raced():
            raise RuntimeError("race detected in a TPU kernel")
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def _last_kernel_raced() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    return races is not None and races.races_found


def needs_index(load: Callable) -> bool:
    """Whether ``plgpu.load`` must be given an index beside the reference, as up to JAX 0.11."""
    return "idx" in inspect.signature(load).parameters


def simulated_gpu():
    """What makes ``plgpu.kernel`` run in JAX's simulator of a GPU, in which races are errors.

    Raises:
        UnsupportedError: Where JAX has none for users, as 0.10.2.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "InterpretGPUParams"):
        raise UnsupportedError(f"JAX {jax.__version__} has no simulator of a GPU; use 0.12 or newer")
    return plgpu.InterpretGPUParams(detect_races=True)
