"""Low-rank factors of many small matrices at once, through the eigenvectors of their Gram matrices."""

import jax
import jax.numpy as jnp

from kvec_jax.typing import Array

_EXACT = jax.lax.Precision.HIGHEST


def factorize(rows: Array, max_rank: int) -> tuple[Array, Array, Array]:
    """The best approximations of low rank: ``rows ~ left @ right``.

    The eigenvectors of the smaller of the two Gram matrices are one factor, and the rows projected on them the other,
    so that no accuracy is lost where singular values are small: at full rank the product is the rows to rounding.

    Args:
        rows: [..., S, D]; rows of zeros do no harm.
        max_rank: R, at most min(S, D); static.

    Returns:
        left float32 [..., S, R], right float32 [..., R, D] and singular values float32 [..., R], the largest first.
        The factors of a lower rank are the first columns and rows.

    Example:
        >>> rows = jnp.arange(12.0).reshape(3, 4)
        >>> left, right, _ = factorize(rows, 2)
        >>> bool(jnp.allclose(left @ right, rows, atol=1e-4))
        True
    """
    rows = rows.astype(jnp.float32)
    S, D = rows.shape[-2:]
    if S <= D:
        gram = jnp.einsum("...SD,...ZD->...SZ", rows, rows, precision=_EXACT)
        squares, vectors = _largest(gram, max_rank)
        left, right = vectors, jnp.einsum("...SR,...SD->...RD", vectors, rows, precision=_EXACT)
    else:
        gram = jnp.einsum("...SD,...SZ->...DZ", rows, rows, precision=_EXACT)
        squares, vectors = _largest(gram, max_rank)
        left = jnp.einsum("...SD,...DR->...SR", rows, vectors, precision=_EXACT)
        right = jnp.swapaxes(vectors, -1, -2)
    return left, right, jnp.sqrt(jnp.maximum(squares, 0))


def _largest(gram: Array, count: int) -> tuple[Array, Array]:
    values, vectors = _eigh(gram)  # rising
    return values[..., ::-1][..., :count], vectors[..., ::-1][..., :count]


def _eigh(gram: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors; of several devices that share the threads of one CPU, one matrix at a time.

    A batch is divided among the very threads that run the devices' programs (JAX 0.10.2, 0.12.0): where all of those
    are in a batch and wait for its parts, no thread is left to compute them.
    """
    if jax.default_backend() != "cpu" or jax.local_device_count() == 1:
        return jnp.linalg.eigh(gram)
    one_by_one = jax.lax.map(jnp.linalg.eigh, gram.reshape(-1, *gram.shape[-2:]))
    return tuple(x.reshape(*gram.shape[:-2], *x.shape[1:]) for x in one_by_one)
