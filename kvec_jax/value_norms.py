"""How much each entry's value adds to the output of its layer."""

import functools

import jax.numpy as jnp
from jax import lax

from kvec_jax.pallas.dispatch import choose, differentiable
from kvec_jax.typing import Array, Implementation


def value_norms(
    values: Array, grams: Array, *, implementation: Implementation = None, interpret: bool = False
) -> Array:
    """Norms ||v W|| of every entry's value through some matrices W, which are given by their Gram matrices W W^T.

    The product v W is as wide as the model; v W W^T v^T needs no more than the head size.

    Args:
        values: [B, K, T, D].
        grams: float32 [K, G, D, D].
        implementation: See ``kvec_jax.Implementations``.
        interpret: Whether a kernel is interpreted.

    Returns:
        float32 [B, K, G, T].

    Raises:
        UnsupportedError: If the implementation that was asked for can't do this.

    Example:
        >>> value_norms(jnp.array([[[[3.0, 4.0]]]]), jnp.eye(2)[None, None]).tolist()
        [[[[5.0]]]]
    """
    forms = quadratic_forms(values, grams, implementation=implementation, interpret=interpret)
    return jnp.sqrt(jnp.maximum(forms, 0))


def quadratic_forms(
    values: Array, matrices: Array, *, implementation: Implementation = None, interpret: bool = False
) -> Array:
    """What ``value_norms`` takes the root of: v A v^T of each entry's value v, for any matrices A float32 [K, X, D, D].

    All products and sums in float32, whatever the values' type.
    """
    from kvec_jax.pallas import value_norms_tpu, value_norms_triton  # not before kernels may be needed

    refusal = value_norms_tpu.refusal(values, matrices)
    chosen = choose("value_norms", implementation, pallas_tpu=refusal, pallas_gpu=refusal)
    if chosen == "xla":
        return _quadratic_forms(values, matrices)
    kernels = value_norms_tpu if chosen == "pallas_tpu" else value_norms_triton
    kernel = functools.partial(kernels.quadratic_forms, interpret=interpret)
    return differentiable(kernel, _quadratic_forms)(values, matrices)


def _quadratic_forms(values: Array, matrices: Array) -> Array:
    values = values.astype(jnp.float32)
    through = jnp.einsum("BKTD,KXDE->BKXTE", values, matrices, precision=lax.Precision.HIGHEST)
    return jnp.sum(through * values[:, :, None], axis=-1)
