"""The whole calibration: needles, then eviction errors, with progress; it can be interrupted and goes on."""

import dataclasses
import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvec_jax.calibrate.file import Calibration
from kvec_jax.calibrate.haystack import Haystack
from kvec_jax.calibrate.heads import answer_scores, rank_heads
from kvec_jax.calibrate.layers import eviction_errors, layer_weights
from kvec_jax.calibrate.needles import make_needle, recall
from kvec_jax.calibrate.settings import Settings, Text
from kvec_jax.policies import Policy
from kvec_jax.policies.compresskv import RetrievalHeads
from kvec_jax.records import Records
from kvec_jax.session import LanguageModel

_NEEDLES = 4  # in one text, each asked for by itself
_NEW_TOKENS = 24
_RECALL = 0.5  # an answer with more of the wanted words is right
_CACHE = 32  # tokens per layer of the cache whose errors are measured
_WINDOW, _KERNEL, _HEADS = 8, 5, 4  # with which it is made
_REQUESTS = {
    "summary": "Summarise the text above.",
    "terms": "List the most important terms of the text above.",
    "continuation": "Continue the text above.",
}  # and a question about a needle
_DIGITS = 6

Progress = Callable[[str, int, int], None]


def calibrate(
    lm: LanguageModel,
    out: str | os.PathLike,
    settings: Settings = Settings(),  # noqa: B008 - immutable
    text: Text | None = None,
    *,
    name: str | None = None,
    progress: Progress = lambda step, done, total: None,
) -> Calibration:
    """Measures what CompressKV must know of a model, and writes it.

    Results are kept in ``out`` + ``.partial`` as they come. An interrupted calibration that is called again with the
    same arguments goes on from there, and gives the same file as one that ran through.

    Args:
        lm: The model with its tokenizer.
        out: File to write.
        settings: How much is measured.
        text: Where prompts are cut from; ``None`` means Python's language reference.
        name: Of the model in the file; ``None`` means the name by which it was loaded.
        progress: Called with the step's name, how much of it is done, and how much there is.

    Returns:
        The calibration.

    Raises:
        ValueError: If the model doesn't answer often enough, or the text or the lengths don't do.
        OSError: If the file can't be written.
    """
    text = text or Text.reference()
    name = name or lm.name
    context, longest = lm.config.max_position_embeddings, max(settings.lengths) + _NEW_TOKENS
    if longest > context:
        raise ValueError(f"lengths: expected at most {context - _NEW_TOKENS} (the model's context), got {longest}")
    if pathlib.Path(out).is_dir():
        raise ValueError(f"out: expected a file, got the folder {os.fspath(out)}")
    haystack = Haystack(lm.tokenizer, text.text)
    if haystack.size < longest:
        raise ValueError(f"text: expected at least {longest} tokens, more than the longest prompt, got {haystack.size}")
    header = _header(lm, name, settings, text)
    records = Records(f"{os.fspath(out)}.partial", header)
    tried, scores = _head_scores(lm, haystack, settings, records, progress)
    heads = rank_heads(scores.mean)
    errors = _layer_errors(lm, haystack, settings, heads, records, progress)
    counts = {"questions": tried, "right": scores.count, "error_prompts": sum(map(len, errors.values()))}
    calibration = Calibration(
        model=name,
        heads=heads,
        layer_weights=_round(layer_weights(errors)),
        provenance=header | {"episodes": settings.episodes} | counts | {"head_scores": _round(scores.mean)},
    )
    calibration.save(out)
    records.remove()
    return calibration


def _header(lm: LanguageModel, name: str, settings: Settings, text: Text) -> dict[str, Any]:
    """What every single result depends on."""
    from kvec_jax import __version__

    return {
        "model": name,
        "dtype": str(lm.model.dtype),
        "lengths": list(settings.lengths),
        "seed": settings.seed,
        "needles_per_text": _NEEDLES,
        "new_tokens": _NEW_TOKENS,
        "error_cache": {"tokens": _CACHE, "window": _WINDOW, "kernel": _KERNEL, "heads_per_layer": _HEADS},
        "text": text.describe(),
        "versions": {"kvec_jax": __version__, "jax": jax.__version__},
    }


@dataclasses.dataclass
class _Mean:
    """A mean that grows."""

    total: Any = 0.0
    count: int = 0

    def add(self, value) -> None:
        self.total = self.total + np.asarray(value)
        self.count += 1

    @property
    def mean(self) -> np.ndarray:
        return np.round(self.total / self.count, _DIGITS)


def _head_scores(lm, haystack, settings, records, progress) -> tuple[int, _Mean]:
    """Questions asked, and the mean scores of the right answers, of which there are enough."""
    scores, tried, number = _Mean(), 0, 0
    while scores.count < settings.episodes:
        key = f"needles {number}"
        if key not in records:
            records.add(key, _ask(lm, haystack, settings, number))
        for right, score in records[key]:
            tried += 1
            if right:
                scores.add(score)
        progress("retrieval heads: right answers", min(scores.count, settings.episodes), settings.episodes)
        number += 1
        if scores.count < settings.episodes <= tried - scores.count:  # more wrong ones than right ones are wanted
            raise ValueError(
                f"{lm.name} answered only {scores.count} of {tried} questions, and {settings.episodes} right answers "
                "are needed; shorter texts are easier (--lengths)"
            )
    return tried, scores


def _ask(lm: LanguageModel, haystack: Haystack, settings: Settings, number: int) -> list:
    """Whether each question about a text was answered right, and the heads' scores."""
    rng = random.Random(f"needles {settings.seed} {number}")
    length = settings.lengths[number % len(settings.lengths)]
    needles = [make_needle(number * _NEEDLES + i, rng) for i in range(_NEEDLES)]
    prompts, spans = haystack.prompts(length, [needle.question for needle in needles], needles, rng)
    answers, scores = answer_scores(lm.model, prompts, spans, length=length, new=_NEW_TOKENS)
    return [
        [recall(needle.answer, lm.tokenizer.decode(answer)) > _RECALL, _round(score)]
        for needle, answer, score in zip(needles, answers, scores, strict=True)
    ]


def _layer_errors(lm, haystack, settings, heads, records, progress) -> dict[str, list[np.ndarray]]:
    """Errors of every layer, for each kind of prompt."""
    heads = tuple(layer[:_HEADS] for layer in heads)
    policy = Policy(scorer=RetrievalHeads(heads=heads, window=_WINDOW, kernel=_KERNEL), budget=_CACHE)
    errors = {}
    for number in range(settings.layer_texts):
        key = f"errors {number} after {settings.episodes}"  # the heads depend on how many episodes there were
        if key not in records:
            records.add(key, _evict(lm, haystack, settings, policy, number))
        for kind, row in records[key].items():
            errors.setdefault(kind, []).append(np.array(row))
        progress("layer weights: texts", number + 1, settings.layer_texts)
    return errors


def _evict(lm: LanguageModel, haystack: Haystack, settings: Settings, policy: Policy, number: int) -> dict:
    """Errors of every layer, for a prompt of each kind about one text."""
    rng = random.Random(f"errors {settings.seed} {number}")
    needle = make_needle(number, rng)
    requests = {"question": needle.question} | _REQUESTS
    length = max(settings.lengths)
    prompts, _ = haystack.prompts(length, list(requests.values()), [needle], rng)
    errors = eviction_errors(lm.model, prompts, policy, length=length, new=_NEW_TOKENS)
    return {kind: _round(row) for kind, row in zip(requests, errors, strict=True)}


def _round(values) -> list:
    """Plain numbers with a fixed number of digits."""
    return np.round(np.asarray(values, np.float64), _DIGITS).tolist()
