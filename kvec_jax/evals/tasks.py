"""Tasks: those made on the spot, by name, and what all tasks are to the runner."""

import dataclasses
import difflib
import random
from collections.abc import Callable, Sequence

from kvec_jax.calibrate.haystack import Haystack
from kvec_jax.calibrate.settings import Text
from kvec_jax.evals import hidden, listed
from kvec_jax.evals.example import Example
from kvec_jax.evals.room import Room
from kvec_jax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Task:
    """Examples under one name, whose scores are averaged.

    Attributes:
        name: What tables call it.
        examples: Those of one length together.
    """

    name: str
    examples: tuple[Example, ...]


def continuation(room: Room, depth: float, rng: random.Random) -> dict:
    """A text that goes on: how alike are the next tokens' distributions to those of the full cache?"""
    pieces = room.haystack.take(room.length + 200, rng)
    count = len(pieces)
    while count and room.size("\n\n".join(pieces[:count]), "") > room.length:
        count -= 1
    if not count or count == len(pieces):
        raise ValueError(f"lengths: {room.length} tokens don't leave room for a text that goes on")
    gold = "\n\n" + "\n\n".join(pieces[count:])
    return dict(
        context="\n\n".join(pieces[:count]), question="", answers=(), gold=gold,
        metric="agreement", max_new_tokens=0, chat=False, depth=None,
    )  # fmt: skip


MADE: dict[str, Callable[[Room, float, random.Random], dict]] = {
    "needle": hidden.needle,
    "multikey": hidden.multikey,
    "multivalue": hidden.multivalue,
    "multiquery": hidden.multiquery,
    "passkey": hidden.passkey,
    "variables": hidden.variables,
    "kv": listed.kv,
    "lines": listed.lines,
    "common_words": listed.common_words,
    "frequent_words": listed.frequent_words,
    "text": continuation,
}


def check_names(names: Sequence[str]) -> None:
    """Raises unless all names are of tasks that can be made."""
    for name in names:
        if name not in MADE:
            close = difflib.get_close_matches(name, MADE, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"unknown task {name!r}{hint} Known: {', '.join(MADE)}")


def make_tasks(
    names: Sequence[str], tokenizer: Tokenizer, text: Text, lengths: Sequence[int], examples: int, seed: int
) -> list[Task]:
    """Tasks made on the spot; the same arguments give the same examples.

    Args:
        names: Of ``MADE``.
        tokenizer: Of the model.
        text: To hide things in.
        lengths: Of the prompts, in tokens.
        examples: Of each task and length. What is hidden at one place is hidden ever deeper.
        seed: Of the choices.

    Raises:
        ValueError: For an unknown name, or a text or length that is too short.
    """
    check_names(names)
    haystack = Haystack(tokenizer, text.text)
    if names and haystack.size < max(lengths) + 200:
        raise ValueError(f"text: expected at least {max(lengths) + 200} tokens, got {haystack.size}")
    rooms = [Room(tokenizer, haystack, length) for length in lengths]
    return [
        Task(name, tuple(_make(name, room, number, examples, seed) for room in rooms for number in range(examples)))
        for name in names
    ]


def _make(name: str, room: Room, number: int, examples: int, seed: int) -> Example:
    rng = random.Random(f"{name} {room.length} {number} {seed}")
    depth = (number + 0.5) / examples
    fields = dict(metric="found", depth=depth, length=room.length)
    return Example(name=f"{room.length}/{number}", **(fields | MADE[name](room, depth, rng)))
