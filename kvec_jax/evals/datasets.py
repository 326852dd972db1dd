"""Examples from JSON lines: LongBench's, RULER's, and anybody's with a context, a question and answers."""

import gzip
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from kvec_jax.evals.example import Example
from kvec_jax.evals.longbench import SETS
from kvec_jax.evals.metrics import find
from kvec_jax.evals.tasks import Task

_NEW_TOKENS = 64
_HUB = "zip://data/{name}.jsonl::hf://datasets/THUDM/LongBench/data.zip"
_FORMS = (
    "context, question, answers", "prompt, answers", "input, outputs (RULER)",
    "input, context, answers, dataset (LongBench)",
)  # fmt: skip


def read_tasks(path: str | os.PathLike, limit: int | None = None) -> list[Task]:
    """Tasks of a file of JSON lines, gzipped if its name says so.

    A line is an object of one of these forms:

    * ``context``, ``question`` and ``answers`` (a string or a list), and if wanted ``metric``, ``max_new_tokens``,
      ``answer_prefix``, ``all_classes`` and ``task``; with ``prompt`` in place of context and question, only the
      protocol ``aware`` can be run;
    * LongBench's ``input``, ``context``, ``answers``, ``all_classes`` and ``dataset``;
    * RULER's ``input`` and ``outputs``; the last line of ``input`` is taken for the question.

    Args:
        path: The file.
        limit: Most examples of a task, the first ones.

    Returns:
        A task for each ``task`` or ``dataset`` named in the file, or one that is called as the file.

    Raises:
        ValueError: For a line that is none of these; it names the line.
        OSError: If the file can't be read.
    """
    path = pathlib.Path(path)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    return _tasks(((f"{path}, line {i}", line) for i, line in _lines(path)), name, limit)


def hub_tasks(names: Sequence[str], limit: int | None = None) -> list[Task]:
    """Sets of LongBench from the Hugging Face hub.

    Args:
        names: Of the sets.
        limit: Most examples of each.

    Raises:
        ValueError: For an unknown name.
        ImportError: If the package ``datasets`` isn't there; it names the extra.
    """
    for name in names:
        if name not in SETS:
            raise ValueError(f"unknown set of LongBench {name!r}. Known: {', '.join(SETS)}")
    try:
        import datasets
    except ImportError as error:
        raise ImportError("--hub needs the package datasets: pip install 'kvec-jax[eval]'") from error
    tasks = []
    for name in names:
        rows = datasets.load_dataset("json", data_files={"test": _HUB.format(name=name)}, split="test")
        tasks += _tasks(((f"{name}, row {i}", row) for i, row in enumerate(rows)), name, limit)
    return tasks


def _lines(path: pathlib.Path):
    """Numbers and values of the lines that are not empty."""
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8") as file:
        try:
            for i, line in enumerate(file, 1):
                if line.strip():
                    yield i, _parse(line, f"{path}, line {i}")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: expected text in UTF-8") from None


def _parse(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON ({error})") from None


def _tasks(rows: Iterable[tuple[str, Any]], name: str, limit: int | None) -> list[Task]:
    examples: dict[str, list[Example]] = {}
    for place, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected an object with {'; or '.join(_FORMS)}; got {type(row).__name__}")
        task = row.get("task") or row.get("dataset") or name
        of_task = examples.setdefault(str(task), [])
        if limit is None or len(of_task) < limit:
            of_task.append(_example(row, str(task), len(of_task), place))
    if not examples:
        raise ValueError(f"{name}: expected at least one line, got none")
    return [Task(task, tuple(of_task)) for task, of_task in examples.items()]


def _example(row: dict, task: str, number: int, place: str) -> Example:
    """The example of a row; its name tells it from any other, so that another file's results don't pass for its."""
    digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:8]
    fields = {"name": f"{number}-{digest}", "answers": _answers(row, place)}
    if "outputs" in row and "input" in row:
        fields |= _ruler(row)
    elif task in SETS:
        fields |= _longbench(row, task, place)
    elif {"context", "question"} <= row.keys():
        fields |= {"context": row["context"], "question": row["question"], "metric": "qa_f1"}
    elif "prompt" in row:
        fields |= {"context": None, "question": row["prompt"], "metric": "qa_f1"}
    else:
        raise ValueError(f"{place}: expected {'; or '.join(_FORMS)}; got {', '.join(row) or 'nothing'}")
    own = {key: row[key] for key in ("metric", "max_new_tokens", "answer_prefix") if row.get(key) is not None}
    fields = {"max_new_tokens": _NEW_TOKENS, "classes": tuple(row.get("all_classes") or ())} | fields | own
    _check(fields, place)
    return Example(**fields)


def _answers(row: dict, place: str) -> tuple[str, ...]:
    answers = next((row[key] for key in ("answers", "outputs", "answer") if row.get(key)), None)
    answers = [answers] if isinstance(answers, str | int | float) else answers
    if not isinstance(answers, list) or not all(str(answer).strip() for answer in answers):
        raise ValueError(f"{place}: expected 'answers', a list of at least one, got {answers!r}")
    return tuple(str(answer) for answer in answers)


def _ruler(row: dict) -> dict:
    context, _, question = row["input"].rstrip().rpartition("\n")
    return {
        "context": context or None,
        "question": question,
        "metric": "found",
        "gold": ", ".join(map(str, row["outputs"])),
        "max_new_tokens": 128 if len(row["outputs"]) > 1 else 48,
    }


def _longbench(row: dict, task: str, place: str) -> dict:
    like = SETS[task]
    if {"context", "input"} <= row.keys():
        asked = {
            "context": f"{like.before}\n\n{row['context']}",
            "question": like.request.replace("{input}", row["input"]),
        }
    elif {"context", "question"} <= row.keys():
        asked = {
            "context": f"{like.before}\n\n{row['context']}",
            "question": like.request.replace("{input}", row["question"]),
        }
    elif "prompt" in row:
        asked = {"context": None, "question": row["prompt"]}
    else:
        raise ValueError(f"{place}: expected {'; or '.join(_FORMS)}; got {', '.join(row) or 'nothing'}")
    shared = ("metric", "max_new_tokens", "answer_prefix", "first_line", "chat")
    return asked | {key: getattr(like, key) for key in shared}


def _check(fields: dict, place: str) -> None:
    kinds = {"context": str | None, "question": str, "metric": str, "max_new_tokens": int, "answer_prefix": str}
    for key, kind in kinds.items():
        if key in fields and not isinstance(fields[key], kind):
            raise ValueError(f"{place}: expected text in {key!r}, got {fields[key]!r}")
    try:
        find(fields["metric"])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
