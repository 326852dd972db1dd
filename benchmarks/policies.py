"""What compression costs and saves, policy by policy: ``python -m benchmarks.policies``.

All prefills (compression included) are timed in turn, round after round, and each one's fastest is compared with the
full cache's: whatever else runs on a machine only adds to a time. Processor time says less of what a user waits for
than seconds do, but is steadier where other programs run. Bytes are those of the buffers; memory is what XLA reports
for the compiled program beside its arguments.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine, prompt
from kvec_jax.policies.prepared import prepare
from kvec_jax.prefill import run_prefill

_DEFAULT = "snapkv,compresskv,laprox,pyramidkv,adakv,kvec"


def main() -> None:
    """Prints the machine, then a table with one row per policy."""
    options = _options()
    console = Console(width=110)
    lm = kv.load(options.model, dtype=options.dtype)
    console.print(machine(options.model, lm.model.dtype), highlight=False)
    tokens, lengths = prompt(lm, options.tokens), jnp.array([options.tokens], jnp.int32)
    names = ["full", *options.policies.split(",")]
    with console.status("compiling"):
        programs = [_Program(lm.model, make(name, options.budget, options.model), tokens, lengths) for name in names]
    with console.status("running"):
        fastest = _fastest(programs, options.runs)
    table = Table(title=f"Prefill and compression of {options.tokens:,} tokens, budget {options.budget}")
    table.caption = f"fastest of {options.runs}"
    for heading in (
        "policy",
        "seconds",
        "over full",
        "processor time",
        "cache MB",
        "of budget",
        "program MB",
    ):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    rows = options.budget * lm.config.num_key_value_heads * lm.config.num_hidden_layers
    for name, program, times in zip(names, programs, fastest, strict=True):
        cache = program.cache
        expected = rows * 2 * lm.config.head_dim * cache.keys.dtype.itemsize
        table.add_row(
            name,
            f"{times[0]:.2f}",
            *(f"{own / full:.3f}" for own, full in zip(times, fastest[0], strict=True)),
            f"{cache.nbytes / 1e6:.1f}",
            f"{cache.nbytes / expected:.3f}" if name != "full" else "",
            f"{program.megabytes:.0f}",
        )
    console.print(table)


def make(name: str, budget: int, model: str) -> kv.Policy:
    """The policy of that name; CompressKV with the model's own calibration."""
    if name == "full":
        return kv.FullCache()
    settings = {"calibration": model} if name == "compresskv" else {}
    return kv.policies.get(name)(budget, **settings)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--policies", default=_DEFAULT)
    parser.add_argument("--runs", type=int, default=5, help="timed rounds (default: %(default)s)")
    return parser.parse_args()


class _Program:
    """A compiled prefill, and the cache that it makes."""

    def __init__(self, model, policy, tokens, lengths):
        self._arguments = model, prepare(policy, model), tokens, lengths
        run = jax.jit(functools.partial(run_prefill, policy=policy, reserve=0))
        self._compiled = run.lower(*self._arguments).compile()
        memory = self._compiled.memory_analysis()
        self.megabytes = (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 1e6
        self.cache = self()[1]  # also warms up

    def __call__(self):
        return jax.block_until_ready(self._compiled(*self._arguments))


def _fastest(programs: list[_Program], runs: int) -> list[tuple[float, float]]:
    """Fewest seconds, and fewest of processor time, that each took in ``runs`` rounds of all."""
    rounds = [[_times(program) for program in programs] for _ in range(runs)]
    return [tuple(map(min, zip(*times))) for times in zip(*rounds)]


def _times(program: _Program) -> tuple[float, float]:
    """Seconds, and seconds of processor time, of a run."""
    start = time.perf_counter(), time.process_time()
    program()
    return time.perf_counter() - start[0], time.process_time() - start[1]


if __name__ == "__main__":
    main()
