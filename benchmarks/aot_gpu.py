"""Each GPU kernel at the sizes of published models, compiled for an H100: memory and threads of its programs."""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable

from kvec_jax.pallas.aot import CHIPS, lower_for
from tests.kernel_cases import Case, cases

# Of NVIDIA's data sheet for the H100 SXM.
BANDWIDTH = 3.35e12

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
    found = [(case, launches(case, report)) for case in cases() if only in case.name]
    return [
        f"{len(found)} programs were compiled for the table below.",
        "",
        "| case | kernel | programs | threads | shared KiB | least MB | memory µs |",
        "|---|---|--:|--:|--:|--:|--:|",
        *(_line(case, launch) for case, kernels in found for launch in kernels),
    ]


def launches(case: Case, report: Callable[[str], None]) -> list[Launch]:
    """The Pallas kernels of a case; what XLA does around them is left out."""
    report(f"h100: {case.name}")
    lowered = lower_for("h100", case.using("pallas_gpu"), *case.arguments)
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


def _line(case: Case, launch: Launch) -> str:
    least = case.least_bytes
    return (
        f"| {case.name} | {launch.name} | {launch.programs} | {launch.threads} | {launch.shared / 1024:.0f} "
        f"| {least / 1e6:.2f} | {least / BANDWIDTH * 1e6:.1f} |"
    )
