"""The evaluation: every example under every policy and budget, one line of results each; it can be interrupted."""

import dataclasses
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kvec_jax.evals import metrics
from kvec_jax.evals.example import LONGEST_GOLD, Prompt, make_prompt
from kvec_jax.evals.measure import run_batch
from kvec_jax.evals.programs import Programs
from kvec_jax.evals.settings import Settings
from kvec_jax.evals.tasks import Task
from kvec_jax.evals.trials import Trial
from kvec_jax.records import Records
from kvec_jax.session import LanguageModel, bucket

RESULTS = "results.jsonl"

Progress = Callable[[str, int, int], None]


def evaluate(
    lm: LanguageModel,
    out: str | os.PathLike,
    tasks: Sequence[Task],
    trials: Sequence[Trial],
    settings: Settings = Settings(),  # noqa: B008 - immutable
    *,
    about: dict[str, Any] | None = None,
    progress: Progress = lambda step, done, total: None,
) -> pathlib.Path:
    """Runs policies and budgets over tasks, and writes a line for each example as soon as its results are there.

    A prompt is read once for all policies and budgets whose caches fit into memory together. Examples whose results are
    there already are skipped; an interrupted evaluation that is called again goes on, and gives the same results as one
    that ran through, but for the seconds. Tasks, policies and budgets may be added later.

    Args:
        lm: The model with its tokenizer.
        out: Folder for the results; made if it isn't there.
        tasks: What is asked.
        trials: What is compared. The full cache is always read too: divergences are from it.
        settings: How examples are run.
        about: Further plain values that the results depend on, such as a seed.
        progress: Called with a step's name, how much of it is done, and how much there is.

    Returns:
        The file of results.

    Raises:
        ValueError: For an example that can't be run, or a folder with results that depend on something else.
        OSError: If the folder can't be written to.
    """
    out = pathlib.Path(out)
    plans = [_plan(lm, task, protocol, settings) for protocol in settings.protocols for task in tasks]
    out.mkdir(parents=True, exist_ok=True)
    records = Records(out / RESULTS, _header(lm, about or {}))
    programs = Programs(lm.model)
    for plan in plans:
        done = 0
        for batch in plan.batches:
            _run_missing(lm, programs, records, plan, batch, trials, settings)
            done += len(batch)
            progress(f"{plan.task}, {plan.protocol}", done, sum(map(len, plan.batches)))
    return records.path


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A task under a protocol: its prompts, in batches of about one length, longest last."""

    task: str
    protocol: str
    batches: list[list[Prompt]]

    def key(self, prompt: Prompt) -> str:
        return f"{self.protocol}/{self.task}/{prompt.example.name}"


def _plan(lm: LanguageModel, task: Task, protocol: str, settings: Settings) -> _Plan:
    context = lm.config.max_position_embeddings
    by_bucket: dict[tuple, list[Prompt]] = {}
    for example in task.examples:
        if protocol == "agnostic" and example.context is None:
            raise ValueError(
                f"{task.name}, {example.name}: the question can't be told from the context, so the protocol 'agnostic' "
                "is not possible; use --protocols aware"
            )
        if example.metric != "agreement":
            metrics.find(example.metric)
        most = context - max(example.max_new_tokens, LONGEST_GOLD)
        prompt = make_prompt(lm.tokenizer, example, min(most, settings.most_tokens or most))
        by_bucket.setdefault((bucket(len(prompt.tokens), context), example.max_new_tokens), []).append(prompt)
    batches = [
        prompts[i : i + settings.batch]
        for _, prompts in sorted(by_bucket.items(), key=lambda item: item[0])
        for i in range(0, len(prompts), settings.batch)
    ]
    return _Plan(task.name, protocol, batches)


def _header(lm: LanguageModel, about: dict[str, Any]) -> dict[str, Any]:
    from kvec_jax import __version__

    device = jax.devices()[0]
    return {
        "model": lm.name,
        "dtype": str(lm.model.dtype),
        "device": f"{device.platform} ({device.device_kind})",
        "versions": {"kvec_jax": __version__, "jax": jax.__version__, "python": platform.python_version()},
    } | about


def _run_missing(lm, programs, records: Records, plan: _Plan, batch, trials, settings: Settings) -> None:
    """Runs a batch under the trials that a prompt of it has no results of, and writes what was missing."""
    keys = [plan.key(prompt) for prompt in batch]
    known = [records[key]["results"] if key in records else {} for key in keys]
    missing = [trial for trial in trials if any(trial.label not in results for results in known)]
    if not missing:
        return
    made = [dict(results) for results in known]
    for label, rows in run_batch(lm, programs, plan.protocol, batch, missing, settings):
        for results, row in zip(made, rows, strict=True):
            results.setdefault(label, row)
    for key, prompt, results, before in zip(keys, batch, made, known, strict=True):
        if len(results) > len(before):
            records.add(key, _facts(plan, prompt) | {"results": results})


def _facts(plan: _Plan, prompt: Prompt) -> dict[str, Any]:
    example = prompt.example
    return {
        "task": plan.task,
        "protocol": plan.protocol,
        "length": example.length,
        "depth": example.depth,
        "prompt_tokens": len(prompt.tokens),
        "answers": list(example.answers),
    }
