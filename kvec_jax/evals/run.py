"""The evaluation: every example under every policy and budget, one line of results each; it can be interrupted."""

import dataclasses
import os
import pathlib
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvec_jax.arguments import check_choice, check_count
from kvec_jax.cache import CompressedKV, coverage
from kvec_jax.calibrate.replay import pad
from kvec_jax.evals import metrics
from kvec_jax.evals.example import Prompt, make_prompt
from kvec_jax.evals.programs import Programs
from kvec_jax.evals.tasks import Task
from kvec_jax.evals.trials import FULL, Trial
from kvec_jax.policies import FullCache, Policy
from kvec_jax.records import Records
from kvec_jax.running import cut_at_end
from kvec_jax.session import LanguageModel, bucket

RESULTS = "results.jsonl"
PROTOCOLS = ("aware", "agnostic")
_STEP = 16  # questions and right answers are padded to multiples of this
_BINS = 64  # in which kept positions are counted
_DIGITS = 5

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How examples are run.

    Attributes:
        protocols: ``"aware"``: the question is part of the prompt that is compressed, as in the papers on eviction;
            ``"agnostic"``: only the context is compressed, and the question comes after, as in kvpress.
        batch: Examples of about one length that are run together.
        memory: Bytes that the caches of one reading may take together; where more policies and budgets are asked for,
            prompts are read again.
        separate: Whether to read prompts once for every policy and budget, which takes longer; then the seconds of
            reading are each policy's own.
        most_tokens: Longest prompt; of longer ones the middle is left out. ``None`` means what the model can take.
    """

    protocols: tuple[str, ...] = ("aware",)
    batch: int = 8
    memory: int = 4 << 30
    separate: bool = False
    most_tokens: int | None = None

    def __post_init__(self):
        for protocol in self.protocols:
            check_choice("protocol", protocol, PROTOCOLS)
        check_count("batch", self.batch, 1)
        check_count("memory", self.memory, 1)
        if self.most_tokens is not None:
            check_count("most_tokens", self.most_tokens, 64)


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
        most = context - max(example.max_new_tokens, _STEP * 4)
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
    for label, rows in _run(lm, programs, plan.protocol, batch, missing, settings):
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


def _run(lm, programs: Programs, protocol: str, batch, trials, settings) -> Iterator[tuple[str, list[dict]]]:
    """Results of each trial for the prompts of a batch."""
    context = lm.config.max_position_embeddings
    aware = protocol == "aware" or not batch[0].example.question
    splits = [len(prompt.tokens) if aware else prompt.split for prompt in batch]
    rows = [prompt.tokens[:split] for prompt, split in zip(batch, splits, strict=True)]
    questions = [prompt.tokens[split:] for prompt, split in zip(batch, splits, strict=True)]
    # The bucket is the whole prompt's under both protocols.
    tokens, lengths = pad(rows, bucket(max(len(prompt.tokens) for prompt in batch), context))
    question, question_lengths = _pad(questions)
    gold, gold_lengths = _pad([prompt.gold for prompt in batch])
    new = batch[0].example.max_new_tokens
    reserve = question.shape[1] + max(gold.shape[1], new)
    reference = None
    for group in _groups(trials, lm, tokens.shape, settings):
        policies = tuple(policy for _, policy in group)
        (logits, caches), seconds = programs.read(policies, tokens, lengths, reserve)
        for (trial, _), cache in zip(group, caches, strict=True):
            facts = {"prefill_seconds": seconds / len(batch), "read_together": len(group)}
            costs, before = _costs(cache, lengths), logits
            if question.shape[1]:
                (before, cache), _ = programs.ask(cache, question, question_lengths)
            (log_probabilities, measured), _ = programs.follow(cache, before, gold, gold_lengths, reference)
            if reference is None:  # the first cache is the full one
                reference = log_probabilities
            if trial is None:
                continue
            answers, spent = programs.answer(cache, before, new) if new else (None, 0.0)
            yield trial.label, _results(lm, batch, measured, costs, answers, facts | _seconds(spent, len(batch)))


def _groups(trials: Sequence[Trial], lm: LanguageModel, shape, settings: Settings) -> Iterator[list]:
    """Trials with their policies, as many together as memory allows; the first is the full cache, wanted or not."""
    B, T = shape
    full = next((trial for trial in trials if trial.name == FULL), None)
    wanted = [(full, FullCache())] + [(trial, trial.policy) for trial in trials if trial is not full]
    group, used = [], 0
    for trial, policy in wanted:
        alone = settings.separate or not isinstance(policy, Policy)
        size = _cache_bytes(lm, policy, B, T) if isinstance(policy, Policy) else 0
        if group and (alone or used + size > settings.memory or not isinstance(group[-1][1], Policy)):
            yield group
            group, used = [], 0
        group.append((trial, policy))
        used += size
    yield group


def _cache_bytes(lm: LanguageModel, policy: Policy, B: int, T: int) -> int:
    layers = lm.config.num_hidden_layers
    tokens = -(-policy.budget.total(T, layers) // layers)
    return B * lm.config.kv_bytes(T, lm.model.dtype.itemsize, min(tokens, T))


def _pad(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    longest = max(map(len, rows))
    return pad(rows, -(-longest // _STEP) * _STEP)


def _seconds(decode: float, rows: int) -> dict[str, float]:
    return {"decode_seconds": decode / rows}


def _costs(cache: CompressedKV, lengths: np.ndarray) -> list[dict[str, Any]]:
    """Of each prompt: bytes of its share of the cache, entries kept, coverage, and where they lie."""
    kept = np.asarray(cache.counts).sum(axis=(1, 2))
    L, K = cache.counts.shape[1:]
    return [
        {
            "cache_bytes": cache.pool_nbytes // len(kept),
            "kept": int(kept[row]) / (int(lengths[row]) * L * K),
            "coverage": share,
            "where": _where(cache, row, int(lengths[row])),
        }
        for row, share in enumerate(coverage(cache).tolist())
    ]


def _where(cache: CompressedKV, row: int, length: int) -> list[list[int]]:
    """How many entries each head of each layer keeps in each of ``_BINS`` equal parts of the prompt."""
    return [
        np.bincount(positions * _BINS // length, minlength=_BINS).tolist()
        for layer in cache.kept_positions(row)
        for positions in layer
    ]


def _results(lm: LanguageModel, batch, measured, costs, answers, facts) -> list[dict[str, Any]]:
    measured = {name: np.asarray(values, np.float64).tolist() for name, values in measured.items()}
    results = []
    for row, prompt in enumerate(batch):
        values = {name: measured[name][row] for name in measured}
        text, tokens = "", []
        if answers is not None:
            tokens = cut_at_end(np.asarray(answers[row]).tolist(), lm.config.eos_token_ids)
            text = lm.tokenizer.decode(tokens)
        metric = prompt.example.metric
        values["score"] = values["agreement"] if metric == "agreement" else metrics.score(prompt.example, text)
        where = costs[row]["where"] if prompt.example.name.endswith("/0") else None
        values |= costs[row] | facts | {"where": where, "answer": text, "new_tokens": len(tokens)}
        results.append({name: round(v, _DIGITS) if isinstance(v, float) else v for name, v in values.items()})
    return results
