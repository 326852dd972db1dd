"""cuDNN's flash attention on a GPU, through ``jax.nn.dot_product_attention``."""

import jax
import jax.numpy as jnp

from kvec_jax.typing import Array


def refusal(queries: Array, keys: Array, interpret: bool) -> str | None:
    """Why these arrays can't be had, or ``None``."""
    D = queries.shape[-1]
    if interpret:
        return None
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.float16, jnp.bfloat16):
        return f"cuDNN takes float16 or bfloat16 queries and keys of one type, got {queries.dtype} and {keys.dtype}"
    most = 256 if _compute_capability() >= 9 else 128
    if D > most or D % 8:
        return f"cuDNN takes heads of a multiple of 8, at most {most} on this GPU, got {D}"
    return None


def attend(
    queries: Array, keys: Array, values: Array, scale: float, window: int | None, interpret: bool
) -> tuple[Array, None]:
    """Causal attention, see ``kvec_jax.prompt_attention``; a query sees ``window`` tokens, or all before it.

    The log-sum-exp isn't asked for: JAX rounds it to the type of the output.
    """
    out = jax.nn.dot_product_attention(
        *(jnp.swapaxes(x, 1, 2) for x in (queries, keys, values)),
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla" if interpret else "cudnn",
    )
    return jnp.swapaxes(out, 1, 2), None


def _compute_capability() -> float:
    """Of the GPU that there is; 0 where there is none."""
    devices = [device for device in jax.devices() if device.platform == "gpu"]
    return float(getattr(devices[0], "compute_capability", 0)) if devices else 0.0
