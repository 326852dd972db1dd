"""What compression costs and saves, policy by policy: ``python -m benchmarks.policies``.

Each policy's prefill (compression included) is timed in turn with that of the full cache; processor time says less of
what a user waits for than seconds do, but is steadier where other programs run. Bytes are those of the buffers; memory
is what XLA reports for the compiled program beside its arguments.
"""

import argparse
import functools
import statistics
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
    console.print(machine(options.model, lm.model.dtype, options.runs), highlight=False)
    tokens, lengths = prompt(lm, options.tokens), jnp.array([options.tokens], jnp.int32)
    full = _Program(lm.model, kv.FullCache(), tokens, lengths)
    table = Table(title=f"Prefill and compression of {options.tokens:,} tokens, budget {options.budget}")
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
    table.add_row("full", "", "1.00", "1.00", f"{_cache(full).pool_nbytes / 1e6:.1f}", "", f"{full.megabytes:.0f}")
    config = lm.config
    for name in options.policies.split(","):
        with console.status(name):
            program = _Program(lm.model, make(name, options.budget, options.model), tokens, lengths)
            seconds, *ratios = _compare(full, program, options.runs)
        cache = _cache(program)
        rows = options.budget * config.num_key_value_heads * config.num_hidden_layers
        expected = rows * 2 * config.head_dim * cache.keys.dtype.itemsize
        table.add_row(
            name,
            f"{seconds:.2f}",
            *(f"{ratio:.3f}" for ratio in ratios),
            f"{cache.nbytes / 1e6:.1f}",
            f"{cache.nbytes / expected:.3f}",
            f"{program.megabytes:.0f}",
        )
    console.print(table)


def make(name: str, budget: int, model: str) -> kv.Policy:
    """The policy of that name; CompressKV with the model's own calibration."""
    settings = {"calibration": model} if name == "compresskv" else {}
    return kv.policies.get(name)(budget, **settings)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--policies", default=_DEFAULT)
    parser.add_argument("--runs", type=int, default=3, help="timed pairs (default: %(default)s)")
    return parser.parse_args()


class _Program:
    """A compiled prefill."""

    def __init__(self, model, policy, tokens, lengths):
        self._arguments = model, prepare(policy, model), tokens, lengths
        run = jax.jit(functools.partial(run_prefill, policy=policy, reserve=0))
        self._compiled = run.lower(*self._arguments).compile()
        memory = self._compiled.memory_analysis()
        self.megabytes = (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 1e6

    def __call__(self):
        return jax.block_until_ready(self._compiled(*self._arguments))


def _cache(program: _Program) -> kv.CompressedKV:
    return program()[1]


def _compare(full: _Program, other: _Program, runs: int) -> tuple[float, float, float]:
    """Median seconds of ``other``, and median ratios of the pairs: of seconds, and of processor time."""
    pairs = [(_times(full), _times(other)) for _ in range(runs)]
    ratios = (statistics.median(b[clock] / a[clock] for a, b in pairs) for clock in (0, 1))
    return statistics.median(b[0] for _, b in pairs), *ratios


def _times(program: _Program) -> tuple[float, float]:
    """Seconds, and seconds of processor time, of a run."""
    start = time.perf_counter(), time.process_time()
    program()
    return time.perf_counter() - start[0], time.process_time() - start[1]


if __name__ == "__main__":
    main()
