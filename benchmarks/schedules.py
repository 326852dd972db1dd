"""What libtpu's compiler says of the kernels in a program: their schedule, bundle by bundle, and their memory.

A TPU's core runs one bundle of instructions a cycle, in order; the compiler has laid out which, so the length of a loop
is known before it runs. Waiting for memory comes on top.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator

# "  0x2a LB: >> {" is a bundle in two loops, with which the inner one begins. An empty bundle, "{}", has no marks and
# belongs to what stands before it.
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +([A-Z]{2})? *: *((?:> ?)*)\{(.?)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a kernel, without the loops in it; the first of a kernel is what stands outside all loops.

    Attributes:
        depth: Loops around its bundles, itself included.
        bundles: Of one round; the branches of a condition all count.
    """

    depth: int
    bundles: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        name: In the program.
        loops: In the order of the program.
        vmem: Bytes that it sets aside.
    """

    name: str
    loops: tuple[Loop, ...]
    vmem: int

    @property
    def bundles(self) -> int:
        """In all, each counted once."""
        return sum(loop.bundles for loop in self.loops)

    def cycles(self, rounds: tuple[int, ...]) -> int:
        """Bundles that run, where a loop in ``n`` others goes round ``rounds[n]`` times in all.

        Loops deeper than that, which copy row by row, count once for every round of the loop around them.
        """
        times = (1, *rounds)
        return sum(loop.bundles * times[min(loop.depth, len(rounds))] for loop in self.loops)


@contextlib.contextmanager
def dumped() -> Iterator["Dump"]:
    """Has libtpu write what it compiles; nothing may have been compiled for a TPU in this process before."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(
            (
                os.environ.get("LIBTPU_INIT_ARGS", ""),
                f"--xla_jf_dump_to={folder}",
                "--xla_jf_dump_llo_text=true",
                "--xla_jf_dump_llo_pass_label_regex=final_bundles",
            )
        )
        yield Dump(pathlib.Path(folder))


class Dump:
    """The folder that libtpu writes to."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def kernels(self) -> list[Kernel]:
        """The Pallas kernels compiled since this was last asked."""
        vmem = {}
        for path in self._folder.glob("*vmem_report.html"):
            vmem |= _vmem(path.read_text())
        found = []
        for analysis in sorted(self._folder.glob("*schedule-analysis_final_bundles.txt")):
            if "-TLP-" in analysis.name or '"tpu_custom_call"' not in analysis.read_text():
                continue
            stamp, name, number = re.match(r"(\d+)-(\w+)(\.\d+)?-\d+-schedule", analysis.name).groups(default="")
            (schedule,) = self._folder.glob(f"{stamp}-{name}{number}-*[0-9]-final_bundles.txt")
            found.append(Kernel(name=name, loops=loops_of(schedule.read_text()), vmem=vmem.get(name + number, 0)))
        for path in self._folder.iterdir():
            path.unlink()
        return found


def loops_of(schedule: str) -> tuple[Loop, ...]:
    """The loops in the text of a schedule."""
    loops, open_loops = [Loop(0, 0)], [0]
    for line in schedule.splitlines():
        bundle = _BUNDLE.match(line)
        if bundle is None:
            continue
        label, marks, first = bundle.groups()
        depth = marks.count(">")
        if marks or first != "}":
            del open_loops[depth + (label != "LB") :]
            while len(open_loops) <= depth:
                open_loops.append(len(loops))
                loops.append(Loop(len(open_loops) - 1, 0))
        loop = loops[open_loops[-1]]
        loops[open_loops[-1]] = dataclasses.replace(loop, bundles=loop.bundles + 1)
    return tuple(loops)


def _vmem(report: str) -> dict[str, int]:
    """Bytes of each operation, from the page that libtpu writes for people."""
    start = report.index("{", report.index("DATA ="))
    data, _ = json.JSONDecoder().raw_decode(report[start:])
    return {name: operation["total_size"] for name, operation in data["hlo_breakdowns"].items()}
