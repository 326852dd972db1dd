"""What is measured of a batch of prompts: answers, likelihoods, divergences, and what the caches take and keep."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvec_jax.cache import CompressedKV, coverage
from kvec_jax.calibrate.replay import pad
from kvec_jax.evals import metrics
from kvec_jax.evals.example import Prompt
from kvec_jax.evals.programs import Programs
from kvec_jax.evals.settings import Settings
from kvec_jax.evals.tiered import run_tiered
from kvec_jax.evals.trials import FULL, Trial
from kvec_jax.policies import FullCache, Policy
from kvec_jax.running import cut_at_end, round_up
from kvec_jax.session import LanguageModel, bucket
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.reading import read_alike

_STEP = 16  # questions and right answers are padded to multiples of this
_BINS = 64  # in which kept positions are counted
_DIGITS = 5


def run_batch(
    lm: LanguageModel,
    programs: Programs,
    protocol: str,
    batch: Sequence[Prompt],
    trials: Sequence[Trial],
    settings: Settings,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Runs the prompts of a batch, of about one length, under all trials.

    Yields:
        Each trial's label, and what was measured of each prompt, plain values.
    """
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
    # Rounded, so that tasks with answers of about the same length share programs.
    reserve = round_up(question.shape[1] + max(gold.shape[1], new), 64)
    reference = None
    for group in _groups(trials, lm, tokens.shape, settings):
        policies = tuple(policy for _, policy in group)
        if isinstance(policies[0], Tiered):
            asked = (tokens, lengths), (question, question_lengths), (gold, gold_lengths)
            runs = run_tiered(lm.model, policies, *asked, new, reserve)
            for (trial, _), (over, costs, answers, facts) in zip(group, runs, strict=True):
                measured, _ = programs.measure(over, gold, gold_lengths, reference)
                yield trial.label, _results(lm, batch, measured, costs, answers, facts)
            continue
        (logits, caches), seconds = programs.read(policies, tokens, lengths, reserve)
        for (trial, _), cache in zip(group, caches, strict=True):
            costs, before = _costs(cache, lengths), logits
            if question.shape[1]:
                (before, cache), _ = programs.ask(cache, question, question_lengths)
            (log_probabilities, measured), _ = programs.follow(cache, before, gold, gold_lengths, reference)
            if reference is None:  # the first cache is the full one
                reference = log_probabilities
            if trial is None:
                continue
            answers, spent = programs.answer(cache, before, new) if new else (None, 0.0)
            times = {"prefill_seconds": seconds / len(batch), "decode_seconds": spent / len(batch)}
            facts = times | {"read_together": len(group)}
            yield trial.label, _results(lm, batch, measured, costs, answers, facts)


def _groups(trials: Sequence[Trial], lm: LanguageModel, shape, settings: Settings) -> Iterator[list]:
    """Trials with their policies, as many together as memory allows; the first is the full cache, wanted or not."""
    B, T = shape
    full = next((trial for trial in trials if trial.name == FULL), None)
    wanted = [(full, FullCache())] + [(trial, trial.policy) for trial in trials if trial is not full]
    group, used = [], 0
    for trial, policy in wanted:
        size = _cache_bytes(lm, policy, B, T) if isinstance(policy, Policy) else 0
        alone = settings.separate or used + size > settings.memory
        if group and (alone or not _read_together(group[-1][1], policy)):
            yield group
            group, used = [], 0
        group.append((trial, policy))
        used += size
    yield group


def _read_together(one, other) -> bool:
    if isinstance(one, Tiered) and isinstance(other, Tiered):
        return read_alike(one, other)
    return isinstance(one, Policy) and isinstance(other, Policy)


def _cache_bytes(lm: LanguageModel, policy: Policy, B: int, T: int) -> int:
    layers = lm.config.num_hidden_layers
    tokens = -(-policy.budget.total(T, layers) // layers)
    return B * lm.config.kv_bytes(T, lm.model.dtype.itemsize, min(tokens, T))


def _pad(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    longest = max(map(len, rows))
    return pad(rows, -(-longest // _STEP) * _STEP)


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
