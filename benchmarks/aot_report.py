"""What the chips' own compilers say of the kernels, without the chips: ``python -m benchmarks.aot_report``.

Nothing runs: all times are estimates, from the length of the compiled schedule and from the bytes that move. Needs the
compilers, see ``make test-aot``. Each part writes a table to ``benchmarks/results`` and takes about ten minutes on two
cores.
"""

import argparse
import datetime
import importlib.metadata
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX would look for the chips otherwise

from rich.console import Console

from benchmarks import aot_gpu, aot_memory, aot_tpu
from benchmarks.common import processor
from benchmarks.schedules import dumped

RESULTS = pathlib.Path(__file__).parent / "results"

_KERNELS = """\
Estimates, not measurements. *Arithmetic* is the length of the schedule that libtpu laid out for one core: each loop
times how often it goes round (loops side by side as often as the longest of them; of a condition all branches), at the
cycles below. *Memory* is the bytes that move, at the bandwidth below; *of least* is how often that is the arguments and
results. The longer of the two bounds the kernel from below. Bandwidth and peak operations are those of JAX's
`pltpu.get_tpu_info`, for one core (a v5p has two); cycles are the peak divided by what the matrix units do in one, 1.75
G at most (for the v6e the rule would give twice that). VMEM, moved and least are those of the v5e; VMEM of 0 means that
the compiler keeps whole arrays there. Everything is bfloat16, one prompt. Qwen3-8B has the heads of Llama-3.1-8B."""

_PAGED = """\
## `ragged_attention` beside JAX's `paged_attention`

Cycles of the schedule for each kept row of each head, decoding one token: ours over packed rows without a tail, JAX's
over pages of 16 rows, with the number of pages in a block that gives it the fewest. Estimates, as above."""

_GPU = """\
What XLA's compiler for an H100 makes of the kernels: programs, threads and shared memory of each. *Least* is
the arguments and results of the operation, and *memory* the time they take at the 3.35 TB/s of NVIDIA's data sheet:
what no implementation can beat, not what this one takes. Everything is bfloat16, one prompt."""

_MEMORY = f"""\
Llama-3.1-8B in bfloat16 reads {aot_memory.TOKENS:,} tokens and generates {aot_memory.NEW_TOKENS}: one prompt, one chip,
abstract weights. GB (10^9 bytes), as the compiler reports them; where it refuses, its words (G are 2^30 bytes).
`decode` is the loop that generates, given a cache, whose memory it reuses; `prefill` reads the prompt and compresses;
`generate` is both in one program."""


def main() -> None:
    """Writes the tables that were asked for."""
    options = _options()
    console = Console(stderr=True)
    parts = {"tpu": _tpu, "gpu": _gpu, "memory": _memory}
    for part in parts if options.part == "all" else (options.part,):
        text = "\n".join([*parts[part](console.print, options.only), ""])
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"aot_{part}.md"
        path.write_text(text)
        console.print(f"Wrote {path}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot_report", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("all", "tpu", "gpu", "memory"), default="all")
    parser.add_argument("--only", default="", help="cases whose names hold this, such as llama-3.1-8b; not for memory")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    return parser.parse_args()


def _tpu(report, only: str) -> list[str]:
    with dumped() as dump:
        kernels, paged = aot_tpu.lines(dump, report, only), aot_tpu.paged_lines(dump, report)
    title = "# The TPU kernels, as the compiler sees them"
    return [title, "", *_made("libtpu", only), "", _KERNELS, "", *kernels, "", _PAGED, "", *paged]


def _gpu(report, only: str) -> list[str]:
    title = "# The GPU kernels, as the compiler sees them"
    return [title, "", *_made("jax-cuda13-plugin", only), "", _GPU, "", *aot_gpu.lines(report, only)]


def _memory(report, _) -> list[str]:
    return ["# Memory of a whole generation", "", *_made("libtpu"), "", _MEMORY, "", *aot_memory.lines(report)]


def _made(compiler: str, only: str = "") -> list[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", compiler))
    return [
        f"{datetime.date.today()}, {versions}, on {processor()}. Compiled, not run.",
        f"`python -m benchmarks.aot_report{' --only ' * bool(only)}{only}`",
    ]


if __name__ == "__main__":
    main()
