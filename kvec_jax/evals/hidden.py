"""Tasks with something hidden in a long text: needles of RULER's kinds, a pass key, a trail of variables."""

import random
import string

from kvec_jax.evals.room import Room

_COLOURS = "blue green red yellow white black grey purple orange brown silver golden pink scarlet".split()
_PLACES = "house tower garden bridge harbour castle mill library station market chapel stable theatre island".split()
_WORDS = (
    "lantern orchard violin thunder velvet saffron glacier walrus marmalade cinnamon meadow falcon pepper copper "
    "dragon anchor candle pirate ribbon tulip badger walnut crystal hammock jasmine kettle lobster magnet nutmeg "
    "oyster parsley quiver rhubarb squirrel trumpet umbrella vinegar wagon yogurt zebra"
).split()
_SECRET = "The secret password of the {place} is {word}."
_NEEDLES = 4


def needle(room: Room, depth: float, rng: random.Random) -> dict:
    """One password is hidden, and asked for."""
    (place,), (word,) = _places(1, rng), rng.sample(_WORDS, 1)
    question = f"What is the secret password of the {place}?"
    sentence = _SECRET.format(place=place, word=word)
    return _one(room.bury([sentence], [depth], question, rng), question, word, sentence)


def multikey(room: Room, depth: float, rng: random.Random) -> dict:
    """The passwords of four places are hidden, and that of one is asked for; the others distract."""
    places, words = _places(_NEEDLES, rng), rng.sample(_WORDS, _NEEDLES)
    depths = [depth, *(rng.random() for _ in places[1:])]
    question = f"What is the secret password of the {places[0]}?"
    context = _bury_secrets(room, places, words, depths, question, rng)
    return _one(context, question, words[0], _SECRET.format(place=places[0], word=words[0]))


def multivalue(room: Room, depth: float, rng: random.Random) -> dict:
    """Four passwords of one place are hidden, and all are asked for."""
    (place,), words = _places(1, rng), rng.sample(_WORDS, _NEEDLES)
    depths = sorted(rng.random() for _ in words)
    question = f"What are the {_NEEDLES} secret passwords of the {place}? Name all of them."
    sentences = [f"One of the secret passwords of the {place} is {word}." for word in words]
    context = room.bury(sentences, depths, question, rng)
    return _several(context, question, words)


def multiquery(room: Room, depth: float, rng: random.Random) -> dict:
    """The passwords of four places are hidden, and all are asked for."""
    places, words = _places(_NEEDLES, rng), rng.sample(_WORDS, _NEEDLES)
    depths = [rng.random() for _ in places]
    names = ", ".join(f"the {place}" for place in places[:-1]) + f" and the {places[-1]}"
    question = f"What are the secret passwords of {names}? Name all of them."
    context = _bury_secrets(room, places, words, depths, question, rng)
    return _several(context, question, words)


def passkey(room: Room, depth: float, rng: random.Random) -> dict:
    """A number is hidden, and asked for."""
    number = str(rng.randrange(10000, 100000))
    question = "What is the pass key?"
    sentence = f"The pass key is {number}. Remember it. {number} is the pass key."
    context = room.bury([sentence], [depth], question, rng)
    return _one(context, question, number, f"The pass key is {number}.")


def variables(room: Room, depth: float, rng: random.Random) -> dict:
    """A number is handed on from variable to variable, and all that hold it are asked for."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(_NEEDLES + 1)]
    number = rng.randrange(10000, 100000)
    sentences = [f"VAR {names[0]} = {number}"]
    sentences += [f"VAR {later} = VAR {earlier}" for earlier, later in zip(names, names[1:])]
    depths = sorted(rng.random() for _ in names)
    question = f"Which {len(names)} variables hold the value {number}, directly or through one another? Name all."
    context = room.bury(sentences, depths, question, rng)
    return _several(context, question, names)


def _one(context: str, question: str, answer: str, sentence: str) -> dict:
    return dict(context=context, question=question, answers=(answer,), gold=sentence, max_new_tokens=24)


def _several(context: str, question: str, answers: list[str]) -> dict:
    gold = ", ".join(answers)
    return dict(context=context, question=question, answers=tuple(answers), gold=gold, max_new_tokens=48, depth=None)


def _bury_secrets(room: Room, places, words, depths, question: str, rng: random.Random) -> str:
    secrets = [_SECRET.format(place=place, word=word) for place, word in zip(places, words, strict=True)]
    depths, secrets = zip(*sorted(zip(depths, secrets, strict=True)))
    return room.bury(secrets, depths, question, rng)


def _places(count: int, rng: random.Random) -> list[str]:
    """Different ones, such as "blue house", no colour and no building twice."""
    return [f"{a} {b}" for a, b in zip(rng.sample(_COLOURS, count), rng.sample(_PLACES, count))]
