"""Memory of the process while it writes after a long context on tiers: ``python -m benchmarks.tiers_memory``.

The shapes are those of Qwen2.5-0.5B, the weights random. The context is not read, which takes a time that grows with
the square of its length: each layer gets random keys and values, which go to the tiers on the path that a prompt's
take, layer by layer. The steps that follow are real. So memory and bytes mean something, hits and the text do not.
"""

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine
from kvec_jax.models.rope import Rope
from kvec_jax.tiers import resident as residents
from kvec_jax.tiers.decoder import TieredDecoder
from kvec_jax.tiers.layout import Layout
from kvec_jax.tiers.resident import Parts

_QWEN = dict(
    model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
    num_attention_heads=14, num_key_value_heads=2, head_dim=64, attention_bias=True, tie_word_embeddings=True,
    rope=Rope(theta=1e6),
)  # fmt: skip
# What the process may take beside weights and tiers.
_ALLOWED = 500e6


def main() -> None:
    """Prints what the tiers hold and what the process took."""
    options = _options()
    console = Console(width=120, highlight=False)
    started = _memory("VmRSS")
    config = kv.ModelConfig(max_position_embeddings=options.tokens + options.new, **_QWEN)
    model = _random_model(config, jnp.dtype(options.dtype))
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    cache = config.kv_bytes(options.tokens, model.dtype.itemsize)
    policy = kv.Tiered(
        budget=options.budget,
        device_bytes=int(cache * options.device),
        host_bytes=int(cache * options.host),
        disk=options.disk,
    )
    console.print(machine("Qwen2.5-0.5B shapes, random weights", model.dtype))
    console.print(f"{options.tokens:,} tokens, budget {options.budget}, full cache {cache / 1e6:,.0f} MB")
    lengths = jnp.array([options.tokens])
    with TieredDecoder(model, policy, lengths, options.tokens, options.new) as decoder:
        decoder.compile()
        loaded = _memory("VmRSS")
        _forget_peak()
        began = time.perf_counter()
        decoder.fill(_random_layers(decoder.layout, options.tokens, model.dtype))
        stored, storing = time.perf_counter() - began, _memory("VmHWM")
        filled = _memory("VmRSS")
        _forget_peak()
        state = decoder.begin(jnp.zeros((1, config.vocab_size)), kv.Greedy(), jax.random.key(0), options.new, ())
        state = decoder.advance(state, kv.Greedy(), jax.random.key(0), 2, ())  # compiles
        began = time.perf_counter()
        decoder.advance(state, kv.Greedy(), jax.random.key(0), options.new, ())
        writing, elapsed = _memory("VmHWM"), time.perf_counter() - began
        pool, resident = decoder.device_bytes
        host, disk = decoder.store.memory_bytes(), decoder.store.disk_bytes()
        reads, recorder = decoder.store.reads, dataclasses.replace(decoder.recorder)
    bound = policy.device_bytes + policy.host_bytes + weights + _ALLOWED
    table = Table("what", "MB", title=f"{options.new - 2} steps of {elapsed / (options.new - 2):.2f} s; {reads} reads")
    for what, size in {
        "process before it had weights": started,
        "weights": weights,
        "blocks on the device": pool,
        "sinks, recent tokens, index, tables": resident,
        "blocks in host memory": host,
        "disk": disk,
        "process with weights and empty tiers": loaded,
        f"process at most, {stored:.0f} s of storing": storing,
        "process with everything stored": filled,
        "process at most, steps": writing,
        "device_bytes + host_bytes + weights + 500 MB": bound,
    }.items():
        table.add_row(what, f"{size / 1e6:,.0f}")
    console.print(table)
    share = recorder.missed / max(recorder.chosen, 1)
    console.print(f"{recorder.chosen:,} blocks chosen, {share:.0%} of them fetched")
    console.print("within the bound" if writing <= bound else "BEYOND the bound")


def _random_model(config: kv.ModelConfig, dtype) -> kv.Transformer:
    """By numpy, array by array."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: kv.Transformer(config, rngs=nnx.Rngs(0), dtype=dtype)))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32) * 0.02, x.dtype), shapes)
    return nnx.merge(graph, state)


def _random_layers(layout: Layout, tokens: int, dtype) -> Iterator[Parts]:
    shape = 1, layout.heads, tokens, layout.head_dim

    @jax.jit
    def make(key):
        keys, values = (jax.random.normal(k, shape, dtype) for k in jax.random.split(key))
        counts = jnp.full(shape[:2], tokens)
        return residents.cut(keys, values, counts, jnp.bool_(False), layout)

    for layer in range(layout.layers):
        yield make(jax.random.key(layer))


def _memory(field: str) -> float:
    """Bytes of the process: ``VmRSS``, now, or ``VmHWM``, at most since the peak was forgotten."""
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return float(line.split()[1]) * 1024


def _forget_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--new", type=int, default=18, help="tokens to write (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=1 / 64)
    parser.add_argument("--device", type=float, default=1 / 16, help="share of the cache (default: 1/16)")
    parser.add_argument("--host", type=float, default=1 / 4, help="share of the cache (default: 1/4)")
    parser.add_argument("--disk", default="/var/tmp", help="folder (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
