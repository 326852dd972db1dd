"""Tasks over long lists: a record to find by its key, or words to count."""

import json
import random
import re
import uuid

from kvec_jax.evals.room import Room

_COMMON, _TIMES = 5, 8  # common words, and how often each stands in the list
_FREQUENT = 3
_ZETA_2 = 1.645  # the sum of 1 / k^2


def kv(room: Room, depth: float, rng: random.Random) -> dict:
    """A JSON object of random identifiers; the value of one key is asked for (Liu et al., 2023)."""
    pairs = _Growing(lambda: (_identifier(rng), _identifier(rng)))
    key, value = pairs[0]
    question = f'What is the value of the key "{key}" in the JSON object above?'

    def context(count):
        return json.dumps(dict(_with_first_at(pairs[:count], depth)), indent=0)

    return dict(context=room.fill(context, question, 2), question=question, answers=(value,), max_new_tokens=48)


def lines(room: Room, depth: float, rng: random.Random) -> dict:
    """Lines with names and numbers; the number of one is asked for (LongChat's task)."""
    words = _vocabulary(room)
    entries = _Growing(lambda: ("-".join(rng.sample(words, 2)), rng.randrange(10000, 100000)))
    name, number = entries[0]
    question = f"What number stands in line {name}?"

    def context(count):
        return "\n".join(f"Line {name}: the number is <{x}>" for name, x in _with_first_at(entries[:count], depth))

    return dict(context=room.fill(context, question, 2), question=question, answers=(str(number),), max_new_tokens=16)


def common_words(room: Room, depth: float, rng: random.Random) -> dict:
    """A numbered list in which a few words come often and all others once; the few are asked for."""
    words = _vocabulary(room)
    rng.shuffle(words)
    common, rare = words[:_COMMON], words[_COMMON:]
    seed = rng.random()
    question = f"What are the {_COMMON} most common words in the list above?"

    def context(count):
        listed = common * _TIMES + rare[:count]
        random.Random(seed).shuffle(listed)
        return "\n".join(f"{i}. {word}" for i, word in enumerate(listed, 1))

    return _words(room.fill(context, question, 1), question, common)


def frequent_words(room: Room, depth: float, rng: random.Random) -> dict:
    """A text of made-up words whose frequencies fall with the square of their rank; the first ones are asked for."""
    syllables = ["".join(pair) for pair in zip("bdfgklmnprstvz" * 5, "aeiou" * 14)]
    vocabulary = ["".join(rng.sample(syllables, 3)) for _ in range(300)]
    seed = rng.random()
    question = f"What are the {_FREQUENT} most frequent made-up words in the text above?"

    def context(count):
        text = [word for k, word in enumerate(vocabulary, 1) for _ in range(round(count / (_ZETA_2 * k * k)))]
        random.Random(seed).shuffle(text)
        return " ".join(text)

    return _words(room.fill(context, question, 50), question, vocabulary[:_FREQUENT])


def _words(context: str, question: str, answers: list[str]) -> dict:
    gold = ", ".join(answers)
    return dict(context=context, question=question, answers=tuple(answers), gold=gold, max_new_tokens=48, depth=None)


class _Growing:
    """A list that makes its entries as they are asked for, so that a longer one begins with the shorter."""

    def __init__(self, make):
        self._make, self._made = make, []

    def __getitem__(self, index):
        while len(self._made) < (index.stop if isinstance(index, slice) else index + 1):
            self._made.append(self._make())
        return self._made[index]


def _with_first_at(entries: list, depth: float) -> list:
    """The entries with the first of them moved to its depth."""
    first, *others = entries
    at = round(depth * len(others))
    return [*others[:at], first, *others[at:]]


def _identifier(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _vocabulary(room: Room) -> list[str]:
    """Lower-case words of the haystack, sorted."""
    words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", room.haystack.text)))
    if len(words) < 100:
        raise ValueError(f"text: expected at least 100 different words of 4 to 9 letters, got {len(words)}")
    return words
