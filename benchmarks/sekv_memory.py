"""Memory of one decoding step on a TPU, as its compiler reports it: ``python -m benchmarks.sekv_memory``.

The full cache beside SeKV, for the shapes of Llama-3.1-8B and Qwen2.5-14B, without weights and without a TPU: needs
``libtpu``, which ``pip install "jax[tpu]"`` brings. Arguments are weights and cache; the caches are updated in place.
"""

import argparse
import dataclasses
import datetime
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from kvec_jax import host
from kvec_jax.extend import run_extend
from kvec_jax.models.rope import Rope
from kvec_jax.pallas.aot import compile_for, device_of
from kvec_jax.prefill import run_prefill

_LLAMA = dict(
    model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, rope=Rope(theta=500000.0),
)  # fmt: skip
_QWEN = dict(
    model_type="qwen2", vocab_size=152064, hidden_size=5120, intermediate_size=13824, num_hidden_layers=48,
    num_attention_heads=40, num_key_value_heads=8, head_dim=128, attention_bias=True, rope=Rope(theta=1e6),
)  # fmt: skip
SHAPES = {"Llama-3.1-8B": _LLAMA, "Qwen2.5-14B": _QWEN}


def main() -> None:
    """Prints one row per shape and cache."""
    options = _options()
    console = Console(width=120)
    console.print(
        f"{datetime.date.today()}, JAX {jax.__version__}, compiled for one {options.chip} chip, bfloat16, "
        f"{options.tokens:,} tokens, batch 1, room for {options.reserve} more", highlight=False
    )  # fmt: skip
    table = Table("shape", "cache", "cache on device", "on host", "arguments", "temporary", "device in all", "of full")
    for shape, fields in SHAPES.items():
        full = None
        for policy in (kv.FullCache(), kv.SeKV(options.share, factors="host")):
            with console.status(f"{shape}, {policy.name}"):
                cache, sizes = _sizes(options, fields, policy)
            total = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
            full = full or total
            cells = (cache.nbytes - cache.host_nbytes, cache.host_nbytes, sizes.argument_size_in_bytes,
                     sizes.temp_size_in_bytes, total)  # fmt: skip
            table.add_row(shape, policy.name, *(f"{x / 1e9:.2f} GB" for x in cells), f"{total / full:.1%}")
    console.print(table)


def _sizes(options, fields: dict, policy):
    """The abstract cache, and what the compiler says of a step on it."""
    config = kv.ModelConfig(max_position_embeddings=options.tokens + options.reserve, **fields)
    model = nnx.eval_shape(lambda: kv.Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((1, options.tokens), jnp.int32)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    # The same shapes as with the factors on the host, which eval_shape doesn't know of.
    anywhere = dataclasses.replace(policy, factors="device") if policy.name == "sekv" else policy
    read = functools.partial(run_prefill, policy=anywhere, reserve=options.reserve)
    _, cache = jax.eval_shape(lambda model, tokens, lengths: read(model, None, tokens, lengths), model, tokens, one)
    if cache.beyond is not None:
        there = SingleDeviceSharding(device_of(options.chip), memory_kind="pinned_host")
        factors = cache.beyond.factors
        factors = jax.ShapeDtypeStruct(factors.shape, factors.dtype, sharding=there)
        cache = dataclasses.replace(cache, beyond=dataclasses.replace(cache.beyond, factors=factors))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    step = compile_for(options.chip, _step, model, cache, token, one, donate_argnums=(1,))
    return _Bytes(cache), step.memory_analysis()


def _step(model, cache, token, lengths):
    if cache.beyond is not None:  # the type of an abstract argument doesn't say that it lies on the host
        beyond = dataclasses.replace(cache.beyond, factors=host.to_host(cache.beyond.factors))
        cache = dataclasses.replace(cache, beyond=beyond)
    return run_extend(model, cache, token, lengths)


class _Bytes:
    """Bytes of an abstract cache."""

    def __init__(self, cache):
        def size(x):
            return x.size * x.dtype.itemsize

        self.nbytes = sum(map(size, jax.tree.leaves(cache)))
        self.host_nbytes = size(cache.beyond.factors) if cache.beyond is not None else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v5p")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--reserve", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
