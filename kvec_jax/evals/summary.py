"""From lines of results to the numbers of a report."""

import dataclasses
import os
import pathlib
from typing import Any

from kvec_jax.evals.bootstrap import Mean, mean_of
from kvec_jax.evals.trials import BASELINE
from kvec_jax.records import read_records

COMPARED = ("score", "nll", "kl")
MEASURES = ("score", "nll", "kl", "agreement", "coverage", "kept", "cache_bytes")
ALL = "all tasks"


@dataclasses.dataclass(frozen=True)
class Results:
    """What an evaluation found, example by example.

    Attributes:
        about: What it depends on.
        examples: One for each example, sorted by name: its facts, and ``results`` by trial.
    """

    about: dict[str, Any]
    examples: list[dict[str, Any]]

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Results":
        """Reads a file of results.

        Raises:
            ValueError: If it holds something else, or nothing yet.
            OSError: If it can't be read.
        """
        about, records = read_records(path)
        if not records:
            raise ValueError(f"{pathlib.Path(path)}: no results yet")
        return cls(about, [records[name] for name in sorted(records)])

    @property
    def protocols(self) -> list[str]:
        """Those that were run, in the order of the alphabet backwards: aware, agnostic."""
        return sorted({example["protocol"] for example in self.examples}, reverse=True)

    def tasks(self, protocol: str) -> list[str]:
        """Tasks of a protocol, sorted."""
        return sorted({example["task"] for example in self.examples if example["protocol"] == protocol})

    def of(self, protocol: str, task: str, length: int | None = None) -> list[dict[str, Any]]:
        """Examples of a task, of one length if it is given."""
        return [
            example
            for example in self.examples
            if (example["protocol"], example["task"]) == (protocol, task) and length in (None, example["length"])
        ]

    def lengths(self, protocol: str, task: str) -> list[int]:
        """Wanted lengths of a task's examples, none for examples that weren't made for one."""
        return sorted({example["length"] for example in self.of(protocol, task) if example["length"] is not None})

    def trials(self, protocol: str) -> list[str]:
        """Labels of policies and budgets, in the order of the first example that has them."""
        labels = {}
        for example in self.examples:
            if example["protocol"] == protocol:
                labels |= dict.fromkeys(example["results"])
        return list(labels)


def budget_of(label: str) -> tuple[str, str]:
    """Policy and budget of a trial's label.

    >>> budget_of("kvec:window=8@64"), budget_of("full")
    (('kvec:window=8', '64'), ('full', ''))
    """
    policy, _, budget = label.partition("@")
    return policy, budget


@dataclasses.dataclass(frozen=True)
class Row:
    """Means of one trial over the examples of a task.

    Attributes:
        protocol, task: What was run; ``ALL`` stands for the mean over all tasks.
        length: Wanted length of the prompts; ``None`` for all together.
        trial: Policy and budget.
        examples: How many.
        means: Of each measure.
        gains: Of each measure in ``COMPARED``, paired differences to ``BASELINE`` with the same budget; empty where
            there is none.
    """

    protocol: str
    task: str
    length: int | None
    trial: str
    examples: int
    means: dict[str, Mean]
    gains: dict[str, Mean]


def table(results: Results, protocol: str, task: str, length: int | None = None) -> list[Row]:
    """A row for each trial that has results of the task (or, for ``ALL``, of every task)."""
    tasks = results.tasks(protocol) if task == ALL else [task]
    groups = [results.of(protocol, each, length) for each in tasks]
    rows = []
    for trial in results.trials(protocol):
        mine = [[example["results"][trial] for example in group if trial in example["results"]] for group in groups]
        if not all(mine):
            continue
        means = {name: mean_of(*[[each[name] for each in group] for group in mine]) for name in MEASURES}
        count = sum(map(len, mine))
        rows.append(Row(protocol, task, length, trial, count, means, _gains(groups, trial)))
    return rows


def _gains(groups: list[list[dict]], trial: str) -> dict[str, Mean]:
    policy, budget = budget_of(trial)
    rival = f"{BASELINE}@{budget}"
    both = [[each["results"] for each in group if {trial, rival} <= each["results"].keys()] for group in groups]
    if not budget or policy == BASELINE or not all(both):
        return {}
    return {
        name: mean_of(*[[results[trial][name] - results[rival][name] for results in group] for group in both])
        for name in COMPARED
    }
