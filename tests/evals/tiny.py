"""A random model with a tokenizer of letters, and tasks that are short for both."""

import functools
import random

import kvec_jax as kv
from kvec_jax.calibrate.settings import Text
from kvec_jax.evals.example import Example
from kvec_jax.evals.tasks import Task
from kvec_jax.evals.trials import Trial
from tests.calibrate.tiny import Letters, language_model

TRIALS = [
    Trial("full", None, kv.FullCache()),
    Trial("snapkv", 40, kv.SnapKV(40)),
    Trial("kvec", 40, kv.KVec(40)),
]


def text(length: int, seed: int = 0) -> str:
    return "".join(chr(97 + (7 * i + i * i // 3 + seed) % 26) for i in range(length))


@functools.cache
def story() -> Text:
    """Paragraphs of made-up words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(4, 9))) for _ in range(900)]
    return Text("\n\n".join(" ".join(rng.choices(words, k=rng.randrange(5, 40))) for _ in range(80)), "made up")


def example(number: int, length: int = 100, **fields) -> Example:
    defaults = dict(
        name=f"{length}/{number}", context=text(length, number), question="Which?", answers=("ab", "c"), metric="found",
        max_new_tokens=6, length=length, depth=(number + 0.5) / 4,
    )  # fmt: skip
    return Example(**(defaults | fields))


@functools.cache
def tasks() -> tuple[Task, ...]:
    """Two tasks; the first has two batches of two, the second one of three, without answers generated."""
    going_on = dict(
        metric="agreement", question="", answers=(), gold=text(20), max_new_tokens=0, chat=False, depth=None
    )
    return (
        Task("letters", tuple(example(number) for number in range(4))),
        Task("going on", tuple(example(number, 90 - number, **going_on, name=f"x{number}") for number in range(2))),
    )


__all__ = ["TRIALS", "Letters", "example", "language_model", "story", "tasks", "text"]
