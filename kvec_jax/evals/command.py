"""``kvec eval`` and ``kvec report``: their options, and what they print."""

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from kvec_jax.calibrate.settings import Text
from kvec_jax.command_options import add_model_arguments, list_of
from kvec_jax.policies.options import parse_budget


def add_eval(commands) -> None:
    """Adds ``kvec eval``."""
    parser = commands.add_parser(
        "eval",
        help="compare policies and budgets on tasks",
        description="Runs tasks with every policy at every budget, reading each prompt once for all of them, and ends "
        "in tables (report.md, report.csv, times.md) and pictures. When it is interrupted, the same command goes on.",
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the results (default: eval-MODEL)")
    _add_options(parser)
    _add_no_pictures(parser)
    parser.set_defaults(run=_eval)


def add_report(commands) -> None:
    """Adds ``kvec report``."""
    parser = commands.add_parser("report", help="write the tables and pictures of an evaluation again")
    parser.add_argument("folder", metavar="DIR", help="where kvec eval wrote its results")
    _add_no_pictures(parser)
    parser.set_defaults(run=lambda arguments: report(arguments.folder, pictures=arguments.pictures))


def _add_no_pictures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-pictures", action="store_false", dest="pictures", help="tables only")


def _add_options(parser: argparse.ArgumentParser) -> None:
    words = list_of(str)
    add_model_arguments(parser)
    parser.add_argument("--tasks", type=words, metavar="LIST", help="to be made: needle, multikey, multivalue, "
        "multiquery, passkey, variables, kv, lines, common_words, frequent_words, text (default: needle, unless --data "
        "or --hub is given)")  # fmt: skip
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE", help="JSON lines of LongBench, of RULER, or "
        "with context, question and answers; .gz too")  # fmt: skip
    parser.add_argument("--hub", type=words, default=[], metavar="LIST", help="sets of LongBench to download")
    parser.add_argument("--policies", type=words, default="full,streaming,snapkv", metavar="LIST", help="names, with "
        "settings after colons, such as kvec:window=8:scope=model (default: %(default)s)")  # fmt: skip
    parser.add_argument("--budgets", type=list_of(parse_budget), default="64,128,256", metavar="LIST",
        help="tokens per head, or shares of the prompt such as 0.25 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--protocols", type=words, default="aware", metavar="LIST", help="aware: the question is "
        "in the compressed prompt; agnostic: it comes after; or both (default: %(default)s)")  # fmt: skip
    parser.add_argument("--lengths", type=list_of(int), default="1000,2000", metavar="LIST",
        help="of the prompts of made tasks, in tokens (default: %(default)s)")  # fmt: skip
    parser.add_argument("--examples", type=int, default=6, metavar="N",
        help="of each made task and length (default: %(default)s)")  # fmt: skip
    parser.add_argument("--limit", type=int, metavar="N", help="most examples of each task of --data and --hub")
    parser.add_argument("--text", nargs="+", metavar="FILE", help="to hide things in (default: Python's reference)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the made tasks (default: %(default)s)")
    parser.add_argument("--most-tokens", type=int, metavar="N", help="longest prompt; the middle of longer ones is "
        "left out (default: what the model can take)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="prompts run together (default: %(default)s)")
    parser.add_argument("--memory", type=float, default=4.0, metavar="GB",
        help="that the caches of one reading may take together (default: %(default)s)")  # fmt: skip
    parser.add_argument("--separate", action="store_true", help="read prompts once for each policy and budget: slower, "
        "but then the times of reading are each policy's own")  # fmt: skip


def report(folder: str | os.PathLike, *, pictures: bool = True) -> None:
    """Writes the report, and prints its tables and the names of its files."""
    from rich.console import Console
    from rich.markdown import Markdown

    from kvec_jax.evals.report import write_report

    written = write_report(folder, pictures=pictures)
    console = Console(width=None if os.isatty(1) else 150)
    console.print(Markdown((pathlib.Path(folder) / "report.md").read_text(encoding="utf-8")))
    console.print("Written: " + ", ".join(map(str, written)), markup=False, highlight=False)


def _eval(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    import kvec_jax as kv
    from kvec_jax.evals.plots import check_matplotlib
    from kvec_jax.evals.run import evaluate
    from kvec_jax.evals.settings import Settings
    from kvec_jax.evals.trials import make_trials
    from kvec_jax.progress import Bar

    out = arguments.out or f"eval-{pathlib.PurePath(arguments.model).name}"
    console = Console(stderr=True, highlight=False)
    # What can be wrong is looked at before the model is loaded.
    if arguments.pictures:
        check_matplotlib()
    settings = Settings(
        protocols=tuple(arguments.protocols),
        batch=arguments.batch,
        memory=int(arguments.memory * 1e9),
        separate=arguments.separate,
        most_tokens=arguments.most_tokens,
    )
    trials = make_trials(arguments.policies, arguments.budgets, arguments.model)
    names, given = _check_tasks(arguments)
    console.print(f"Loading {arguments.model}", markup=False)
    lm = kv.load(arguments.model, dtype=arguments.dtype)
    lm = dataclasses.replace(lm, name=arguments.model)
    tasks, about = _make_tasks(arguments, names, lm)
    try:
        with Bar(console) as bar:
            evaluate(lm, out, [*tasks, *given], trials, settings, about=about, progress=bar)
    except KeyboardInterrupt:
        console.print(f"Interrupted. The same command goes on from {os.fspath(out)}.", markup=False)
        raise
    report(out, pictures=arguments.pictures)


def _check_tasks(arguments: argparse.Namespace) -> tuple[list[str], list]:
    """Names of the tasks to be made, and the tasks that the user brings."""
    from kvec_jax.arguments import check_count
    from kvec_jax.evals.datasets import hub_tasks, read_tasks
    from kvec_jax.evals.tasks import check_names

    check_count("--examples", arguments.examples, 1)
    if arguments.limit is not None:
        check_count("--limit", arguments.limit, 1)
    for length in arguments.lengths:
        check_count("--lengths", length, 128)
    names = arguments.tasks if arguments.tasks is not None else [] if arguments.data or arguments.hub else ["needle"]
    check_names(names)
    given = [task for file in arguments.data for task in read_tasks(file, arguments.limit)]
    given += hub_tasks(arguments.hub, arguments.limit) if arguments.hub else []
    all_names = [*names, *(task.name for task in given)]
    for name in all_names:
        if all_names.count(name) > 1:
            raise ValueError(f"task {name!r} is there more than once")
    return names, given


def _make_tasks(arguments: argparse.Namespace, names: Sequence[str], lm) -> tuple[list, dict[str, Any]]:
    """The tasks made on the spot, and what they depend on."""
    from kvec_jax.evals.tasks import make_tasks

    text = Text.files(arguments.text) if arguments.text else Text.reference()
    tasks = (
        make_tasks(names, lm.tokenizer, text, arguments.lengths, arguments.examples, arguments.seed) if names else []
    )
    return tasks, {"text": text.describe(), "examples": arguments.examples, "seed": arguments.seed}
