"""Checks and times the GPU kernels on a GPU: ``python -m benchmarks.gpu_check``, in under ten minutes.

Each kernel must give what plain XLA gives there, on small shapes of all kinds and at the sizes of published models; at
those both are timed. A table goes to ``benchmarks/results``. Where there is no GPU, it says so and ends with status 1.
"""

import argparse
import dataclasses
import datetime
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks.common import processor
from tests.arg_specs import TOLERANCE
from tests.kernel_cases import Case, cases, on_gpus, small_cases

RESULTS = pathlib.Path(__file__).parent / "results"
RUNS = 30


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case: the largest difference relative to the largest number, milliseconds, or the error."""

    case: Case
    kernel: str
    difference: float = np.nan
    milliseconds: float = np.nan
    xla: float = np.nan
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and self.difference <= TOLERANCE[self.case.dtype]


def main() -> None:
    """Runs all cases there is time for, writes the table, and fails if one of them did."""
    options = _options()
    platform = jax.default_backend()
    if platform != "gpu":
        sys.exit(f"benchmarks.gpu_check needs a GPU; JAX finds only {platform}")
    console = Console()
    started, outcomes, todo = time.monotonic(), [], on_gpus(small_cases() + cases())
    for case, kernel in todo:
        if time.monotonic() - started > options.minutes * 60:
            break
        outcomes.append(run(case, kernel))
        console.print(_line(outcomes[-1]), highlight=False)
    minutes = (time.monotonic() - started) / 60
    failed = [outcome for outcome in outcomes if not outcome.passed]
    summary = f"{len(outcomes)} of {len(todo)} cases run in {minutes:.1f} minutes, {len(failed)} failed."
    path = options.out / f"gpu_check-{datetime.date.today()}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_report(outcomes, summary))
    console.print(summary, path)
    sys.exit(bool(failed) or len(outcomes) < len(todo))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9, help="begin no case after that (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    return parser.parse_args()


def run(case: Case, kernel: str = "pallas_gpu", interpret: bool = False) -> Outcome:
    """Checks and times a kernel on a case. Whatever it raises is its outcome: others are to be checked all the same."""
    arguments = jax.block_until_ready(jax.jit(case.values)())
    ours, plain = jax.jit(case.using(kernel, interpret)), jax.jit(case.using("xla"))
    if case.dtype == "float32":  # which a GPU would round to 10 bits
        plain = jax.default_matmul_precision("highest")(plain)
    try:
        got = ours(*arguments)
        difference = max(jax.tree.leaves(jax.tree.map(_difference, got, plain(*arguments))))
        return Outcome(case, kernel, difference, _milliseconds(ours, arguments), _milliseconds(plain, arguments))
    except Exception as error:
        return Outcome(case, kernel, error=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")


def _difference(got: jax.Array, expected: jax.Array) -> float:
    """Largest difference, relative to the largest number expected; marks and integers must be equal."""
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return 0.0 if bool(jnp.array_equal(got, expected)) else np.inf
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    finite = jnp.isfinite(expected)
    if not bool(jnp.array_equal(jnp.where(finite, 0, got), jnp.where(finite, 0, expected), equal_nan=True)):
        return np.inf
    largest = jnp.max(jnp.abs(expected), where=finite, initial=1e-30)
    return float(jnp.max(jnp.abs(got - expected), where=finite, initial=0) / largest)


def _milliseconds(function: Callable, arguments: tuple) -> float:
    """Of one call, of many that stand in a row: the device is timed, not what it takes to call it."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    for _ in range(RUNS):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / RUNS * 1e3


def _line(outcome: Outcome) -> str:
    if outcome.error:
        return f"| {outcome.case.name} | {outcome.kernel} | {outcome.error} | | | |"
    return (
        f"| {outcome.case.name} | {outcome.kernel} | {outcome.difference:.1e}{'' if outcome.passed else ' FAILED'} "
        f"| {outcome.milliseconds:.3f} | {outcome.xla:.3f} | {outcome.xla / outcome.milliseconds:.2f} |"
    )


def _report(outcomes: list[Outcome], summary: str) -> str:
    device = jax.devices()[0]
    return "\n".join(
        [
            "# GPU kernels against plain XLA",
            "",
            f"{datetime.date.today()}, {device.device_kind}, {processor()}, JAX {jax.__version__}. {summary}",
            "",
            f"Milliseconds are means of {RUNS} calls in a row. The difference is the largest, relative to the largest",
            f"number of the reference; allowed are {TOLERANCE['float32']} for float32 and {TOLERANCE['bfloat16']} for",
            "bfloat16. Kept sets must be equal.",
            "",
            "| case | kernel | difference | kernel ms | XLA ms | XLA over kernel |",
            "|---|---|--:|--:|--:|--:|",
            *map(_line, outcomes),
            "",
        ]
    )


if __name__ == "__main__":
    main()
