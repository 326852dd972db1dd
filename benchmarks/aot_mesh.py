"""Memory of a whole generation over a 4 x 4 slice of TPU v5e that isn't here: ``python -m benchmarks.aot_mesh``.

Nothing runs. Llama-3.1-8B in bfloat16, abstract weights; rows of the batch over two groups of chips, heads over the
eight of each. Needs libtpu, see ``make test-aot``.
"""

import argparse
import dataclasses
import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX would look for the chips otherwise

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

import kvec_jax as kv
from benchmarks.aot_memory import LLAMA_3_1_8B
from kvec_jax.generate import generate
from kvec_jax.implementations import OPERATIONS, Implementations
from kvec_jax.models.config import ModelConfig
from kvec_jax.pallas.aot import compile_for, mesh_of
from kvec_jax.placement import spec_of
from kvec_jax.spread import abstract

NEW_TOKENS = 128
POLICIES = {"full cache": kv.FullCache(), "SnapKV": kv.SnapKV(1024), "K-VEC": kv.KVec(1024), "LaProx": kv.LaProx(1024)}
# What a TPU would choose by itself, but for the selection where heads compete over several chips.
KERNELS = Implementations(**dict.fromkeys(OPERATIONS, "pallas_tpu"), interpret=False)


def compile_generation(
    mesh: Mesh, config: ModelConfig, policy: kv.Policy, rows: int, tokens: int, new_tokens: int = NEW_TOKENS
) -> jax.stages.Compiled:
    """``kv.generate`` of a batch [rows, tokens], compiled for a mesh of TPU v5e."""

    def place(path, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(mesh, path, x)))

    arguments = dict(
        model=abstract(config, jnp.bfloat16, mesh),
        tokens=jax.ShapeDtypeStruct((rows, tokens), jnp.int32),
        lengths=jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    arguments = jax.tree_util.tree_map_with_path(place, arguments)
    how = KERNELS if policy.scope == "head" else dataclasses.replace(KERNELS, select_top_k="xla")
    function = functools.partial(generate, policy=policy, max_new_tokens=new_tokens, implementation=how)
    return compile_for("v5e", lambda given: function(**given), arguments)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot_mesh", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--policies", nargs="*", choices=list(POLICIES), default=list(POLICIES))
    options = parser.parse_args()
    mesh = mesh_of("v5e", "4x4", (2, 8), ("data", "tensor"))
    print(f"{options.rows} prompts of {options.tokens:,} tokens, {NEW_TOKENS} new ones; GB (10^9 bytes) of each chip")
    print("| policy | arguments | results | temporaries | together |\n|---|--:|--:|--:|--:|")
    for name in options.policies:
        compiled = compile_generation(mesh, LLAMA_3_1_8B, POLICIES[name], options.rows, options.tokens)
        memory = compiled.memory_analysis()
        sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
        print(f"| {name} |", " | ".join(f"{size / 1e9:.2f}" for size in (*sizes, sum(sizes))), "|")


if __name__ == "__main__":
    main()
