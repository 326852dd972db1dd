"""What differs between platforms and between versions of JAX: the only file that looks at either."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax


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
