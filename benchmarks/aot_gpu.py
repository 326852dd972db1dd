"""Each GPU kernel at the sizes of published models, compiled for an H100: memory and threads of its programs."""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable

from kvec_jax.pallas.aot import CHIPS, lower_for
from tests.kernel_cases import Case, cases, on_gpus

# Of NVIDIA's data sheet for the H100 SXM.
BANDWIDTH = 3.35e12

_THROUGH = {"pallas_gpu": "Triton", "mosaic_gpu": "Mosaic GPU"}

_LAUNCH = re.compile(r" (\w+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), 1, 1\] +shared_memory: (\d+) bytes")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a compiled kernel will be started: programs, threads of each, bytes of shared memory of each."""

    name: str
    programs: int
    threads: int
    shared: int


def lines(report: Callable[[str], None], only: str) -> list[str]:
    """The table, in Markdown, of the cases with ``only`` in their names."""
    wanted = on_gpus([case for case in cases() if only in case.name])
    found = [(case, kernel, launches(case, kernel, report)) for case, kernel in wanted]
    return [
        f"{len(found)} programs were compiled for the table below.",
        "",
        "| case | through | kernel | programs | threads | shared KiB | least MB | memory µs |",
        "|---|---|---|--:|--:|--:|--:|--:|",
        *(_line(case, kernel, launch) for case, kernel, launched in found for launch in launched),
    ]


def launches(case: Case, kernel: str, report: Callable[[str], None]) -> list[Launch]:
    """The Pallas kernels of a case; what XLA does around them is left out."""
    report(f"h100: {case.name}, {kernel}")
    lowered = lower_for("h100", case.using(kernel), *case.arguments)
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(CHIPS["h100"].options | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (sequence,) = pathlib.Path(folder).glob("*thunk_sequence.txt")
        started = _LAUNCH.findall(sequence.read_text())
    names = set(re.findall(r'name = "(\w+)"', lowered.as_text()))
    return [
        Launch(name, int(x) * int(y) * int(z), int(threads), int(shared))
        for name, x, y, z, threads, shared in started
        if name in names
    ]


def _line(case: Case, kernel: str, launch: Launch) -> str:
    least = case.least_bytes
    return (
        f"| {case.name} | {_THROUGH[kernel]} | {launch.name} | {launch.programs} | {launch.threads} "
        f"| {launch.shared / 1024:.0f} | {least / 1e6:.2f} | {least / BANDWIDTH * 1e6:.1f} |"
    )
