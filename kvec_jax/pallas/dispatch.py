"""Which implementation of an operation runs."""

from collections.abc import Callable
from typing import get_args

import jax

from kvec_jax.errors import UnsupportedError
from kvec_jax.pallas.compat import default_platform
from kvec_jax.typing import Implementation

# The kernels of each platform; "mosaic_gpu" is another for GPUs, which only runs where it is asked for.
KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
# What an implementation may be called, ``None`` among them.
NAMES: tuple[str | None, ...] = tuple(name for part in get_args(Implementation) for name in (get_args(part) or (None,)))


def choose(operation: str, implementation: Implementation, **refusals: str | None) -> str:
    """The implementation that runs: "xla", or a kernel that supports the case.

    Args:
        operation: What error messages call it.
        implementation: ``None`` picks the kernel of the platform if it supports the case, and XLA otherwise. A name
            is taken as it is, or refused.
        **refusals: For each kernel there is, why it can't do this case; ``None`` where it can.

    Returns:
        ``"xla"``, ``"pallas_tpu"``, ``"pallas_gpu"`` or ``"mosaic_gpu"``.

    Raises:
        ValueError: For an unknown name.
        UnsupportedError: If the kernel that was asked for can't do this case, with the reason.

    Example:
        >>> choose("sum", "pallas_tpu", pallas_tpu=None, pallas_gpu="sizes must be powers of two")
        'pallas_tpu'
    """
    check_implementation("implementation", implementation)
    if implementation is None:
        kernel = KERNELS.get(default_platform(), "xla")
        return kernel if refusals.get(kernel, "there is none") is None else "xla"
    reason = None if implementation == "xla" else refusals.get(implementation, "there is no such kernel")
    if reason is not None:
        raise UnsupportedError(f"{operation}: implementation={implementation!r} can't do this case: {reason}")
    return implementation


def differentiable(kernel: Callable, reference: Callable) -> Callable:
    """The ``kernel`` with the derivatives of the plain ``reference``, which is computed for them again.

    Args:
        kernel: Function of pytrees of arrays.
        reference: Of the same, with the same result.
    """

    def forward(*arguments):
        return kernel(*arguments), arguments

    def backward(arguments, cotangents):
        return jax.vjp(reference, *arguments)[1](cotangents)

    function = jax.custom_vjp(kernel)
    function.defvjp(forward, backward)
    return function


def check_implementation(name: str, value) -> None:
    """Raises unless ``value`` is the name of an implementation, or ``None``."""
    if value not in NAMES:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, NAMES))}, got {value!r}")
