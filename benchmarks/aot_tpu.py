"""Each kernel at the sizes of published models: memory it takes, bytes it moves, length of its schedule."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

from benchmarks.schedules import Dump, Kernel
from benchmarks.traffic import Call, calls_in
from kvec_jax.pallas import pack_rows_tpu, ragged_attention_tpu, select_top_k_tpu
from kvec_jax.pallas.aot import compile_for, on_chip
from tests.arg_specs import BUDGETS, MODELS, Model
from tests.kernel_cases import Case, cases, ragged

CHIPS = ("v5e", "v5p", "v6e")
# Has the heads of Llama-3.1-8B, and so the same kernels.
_AS_ANOTHER = "qwen3-8b"


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one core of a chip: bytes and cycles a second."""

    bandwidth: float
    clock: float

    @classmethod
    def of(cls, chip: str) -> "Figures":
        """From JAX's table; the clock is what the peak of bfloat16 operations takes, the matrix units being known."""
        with on_chip(chip):
            info = pltpu.get_tpu_info()
        clock = info.bf16_ops_per_second / (2 * info.num_mxus * info.mxu_column_size**2)
        return cls(info.mem_bw_bytes_per_second, min(clock, _HIGHEST_CLOCK))


# For the v6e the rule gives 3.5 GHz: its matrix units do more in a cycle than one product in each of their places.
_HIGHEST_CLOCK = 1.75e9


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A case, compiled for a chip; all of its kernels together.

    Attributes:
        vmem: Bytes, of the kernel that takes most.
        bundles: Of all, each counted once.
        cycles: Bundles that run.
        moved: Bytes between the chip's memory and its cores, what XLA does around the kernels included.
    """

    vmem: int
    bundles: int
    cycles: int
    moved: int

    def microseconds(self, figures: Figures) -> tuple[float, float]:
        """Of arithmetic and of memory."""
        return self.cycles / figures.clock * 1e6, self.moved / figures.bandwidth * 1e6


def lines(dump: Dump, report: Callable[[str], None], only: str) -> list[str]:
    """The tables, in Markdown, of the cases with ``only`` in their names."""
    figures = {chip: Figures.of(chip) for chip in CHIPS}
    chosen = [case for case in cases() if only in case.name and _AS_ANOTHER not in case.name]
    compiled = [(case, {chip: _compile(case, chip, dump, report) for chip in CHIPS}) for case in chosen]
    chips = " / ".join(CHIPS)
    return [
        "| chip | bytes a second | cycles a second |",
        "|---|--:|--:|",
        *(f"| {chip} | {x.bandwidth / 1e9:.0f} G | {x.clock / 1e9:.2f} G |" for chip, x in figures.items()),
        "",
        f"{len(compiled) * len(CHIPS)} programs were compiled for the table below.",
        "",
        f"| kernel | VMEM KiB | moved MB | of least | bundles {chips} | arithmetic µs | memory µs | bound by |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
        *(_line(case, by_chip, figures) for case, by_chip in compiled),
    ]


def _compile(case: Case, chip: str, dump: Dump, report: Callable[[str], None]) -> Compiled:
    report(f"{chip}: {case.name}")
    function = case.using("pallas_tpu")
    program = compile_for(chip, function, *case.arguments)
    calls, kernels = calls_in(function, *case.arguments), dump.kernels()
    around = int(program.cost_analysis().get("bytes accessed", 0))
    return Compiled(
        vmem=max(kernel.vmem for kernel in kernels),
        bundles=sum(kernel.bundles for kernel in kernels),
        cycles=sum(_cycles(kernel, case, calls) for kernel in kernels),
        moved=around + sum(call.moved for call in calls) + _copied_by_hand(case),
    )


def _copied_by_hand(case: Case) -> int:
    """Bytes of rows that a kernel fetches itself: of keys and values; of pairs of bfloat16 rows where it packs."""
    if case.operation not in ("ragged_attention", "pack_rows"):
        return 0
    rows = case.rows * (2 if case.operation == "pack_rows" else 1)
    return 2 * rows * case.arguments[0].shape[-1] * 2


def _cycles(kernel: Kernel, case: Case, calls: list[Call]) -> int:
    """Bundles that run: loops go round as often as the grid has steps, and loops in them as the operation says."""
    (call,) = (call for call in calls if call.name == kernel.name)
    inner = _ROUNDS[case.operation](case, call) if case.operation in _ROUNDS else ()
    steps = (call.steps,) if call.steps > 1 else ()
    return kernel.cycles((*steps, *(call.steps * rounds for rounds in inner)))


def _rounds_of_selection(case: Case, call: Call) -> tuple[int, ...]:
    """32 bits of the threshold, and for each a walk over the row."""
    walk = call.blocks[0][1] // select_top_k_tpu._LINES
    return (32, 32 * walk)


def _rounds_of_attention(case: Case, call: Call) -> tuple[int, ...]:
    """Every round takes one step for each of the slots."""
    queries, cache = case.arguments
    heads = queries.shape[0] * queries.shape[1]
    most = cache.keys.shape[1] + cache.tail_capacity
    S = ragged_attention_tpu._block_rows(most, queries.shape[-1] * queries.dtype.itemsize)
    blocks = heads * -(-case.rows // heads // S)
    return (-(-blocks // (ragged_attention_tpu._TOGETHER * ragged_attention_tpu._SLOTS)),)


_ROUNDS = {
    "select_top_k": _rounds_of_selection,
    "ragged_attention": _rounds_of_attention,
    "value_norms": lambda case, call: (call.blocks[1][1],),  # matrices
    "pack_rows": lambda case, call: (call.blocks[1][1] // pack_rows_tpu._TOGETHER,),
}


def _line(case: Case, by_chip: dict[str, Compiled], figures: dict[str, Figures]) -> str:
    first = next(iter(by_chip.values()))
    times = {chip: compiled.microseconds(figures[chip]) for chip, compiled in by_chip.items()}
    bound = {chip: "memory" if memory > arithmetic else "arithmetic" for chip, (arithmetic, memory) in times.items()}
    kinds = sorted(set(bound.values()))
    return " | ".join(
        [
            f"| {case.name}",
            f"{first.vmem / 1024:.0f}",
            f"{first.moved / 1e6:.2f}",
            f"{first.moved / case.least_bytes:.2f}",
            " / ".join(str(compiled.bundles) for compiled in by_chip.values()),
            " / ".join(f"{arithmetic:.1f}" for arithmetic, _ in times.values()),
            " / ".join(f"{memory:.1f}" for _, memory in times.values()),
            (kinds[0] if len(kinds) == 1 else " / ".join(bound.values())) + " |",
        ]
    )


def paged_lines(dump: Dump, report: Callable[[str], None]) -> list[str]:
    """Our attention beside JAX's paged attention, in Markdown."""
    models = [model for model in MODELS if model.D == 128 and model.name != _AS_ANOTHER]
    sizes = [(model, budget) for model in models for budget in BUDGETS]
    return [
        f"| rows | {' | '.join(f'{chip}: ours | JAX' for chip in CHIPS)} |",
        "|---|" + "--:|" * (2 * len(CHIPS)),
        *(_paged_line(model, budget, dump, report) for model, budget in sizes),
    ]


_PAGE = 16  # rows
_PAGES = (16, 32, 64)  # in a block of JAX's kernel; the best of them is taken


def _paged_line(model: Model, budget: int, dump: Dump, report: Callable[[str], None]) -> str:
    case = ragged(model.segments(budget, tail=0))
    cells = [case.size]
    for chip in CHIPS:
        ours = _compile(case, chip, dump, report).cycles
        pages = [n for n in _PAGES if n * _PAGE <= budget]
        theirs = min(_paged_cycles(model, budget, n, chip, dump, report) for n in pages)
        cells += [f"{ours / case.rows:.2f}", f"{theirs / case.rows:.2f}"]
    return f"| {' | '.join(cells)} |"


def _paged_cycles(model: Model, budget: int, pages: int, chip: str, dump: Dump, report: Callable[[str], None]) -> int:
    report(f"{chip}: JAX's paged attention, {model.name}, {budget} rows, {pages} pages a block")
    array = jax.ShapeDtypeStruct
    rows = array((model.K, budget // _PAGE, _PAGE, model.D), jnp.bfloat16)
    compile_for(
        chip,
        functools.partial(paged_attention, pages_per_compute_block=pages),
        array((1, model.N, model.D), jnp.bfloat16),
        rows,
        rows,
        array((1,), jnp.int32),
        array((1, budget // _PAGE), jnp.int32),
    )
    (kernel,) = dump.kernels()
    return kernel.cycles((model.K, model.K * -(-budget // (_PAGE * pages))))
