"""Made-up facts to hide in a text, each with a question and the words that answer it."""

import dataclasses
import random
import re
from collections import Counter


@dataclasses.dataclass(frozen=True)
class Needle:
    """A fact.

    Attributes:
        sentence: What is hidden.
        question: What is asked.
        answer: The part of the sentence that answers.
    """

    sentence: str
    question: str
    answer: str


# Each kind: sentence and question, in which the slots are filled alike; the answer is what fills the slot in capitals.
_KINDS = (
    ("The {thing} of {name} is hidden {WHERE}.", "Where is the {thing} of {name} hidden?"),
    ("The best thing to do in {town} is to {DEED}.", "What is the best thing to do in {town}?"),
    ("On feast days the people of {town} eat {DISH}.", "What do the people of {town} eat on feast days?"),
    ("The {thing} was lent to {name} by {LENDER}.", "By whom was the {thing} lent to {name}?"),
    ("The telephone number of {town} station is {NUMBER}.", "What is the telephone number of {town} station?"),
    ("The statue in {town} shows {STATUE}.", "What does the statue in {town} show?"),
)


def _pairs(first: str, second: str) -> list[str]:
    """All combinations of two lists, separated by bars."""
    return [f"{a} {b}" for a in first.split("|") for b in second.split("|")]


_FILL = {
    "name": "Mirabel Osgood Philippa Thaddeus Rosamund Barnaby Henrietta Cornelius Wilhelmina Ambrose".split(),
    "town": "Quillhaven Brackenford Ottermere Thistledown Saltmarsh Wexcombe Larkminster Dunmallow".split(),
    "thing": _pairs("brass|green|old", "telescope|umbrella|violin|kettle|sea chart|comb|flute|globe"),
    "WHERE": _pairs(
        "under the stairs|behind the piano|inside an empty barrel|on top of the cupboard",
        "of the lighthouse|in the flooded mill|of his aunt's cottage|in the abandoned theatre",
    ),
    "DEED": _pairs(
        "feed the herons by the canal|eat plum cake on the harbour wall|watch the glassblowers|ride the tram",
        "at dawn|on a rainy Sunday|after the first snow|when the bells ring",
    ),
    "DISH": _pairs(
        "smoked eel with|roasted chestnuts with|pickled mushrooms with|barley soup with|rabbit stew with",
        "honey and vinegar|sour cherries|burnt butter|rye bread",
    ),
    "LENDER": _pairs(
        "a retired admiral from|two travelling acrobats from|the youngest dentist from|a blind mapmaker from",
        "the northern islands|across the river|the mountain school",
    ),
    "STATUE": _pairs(
        "a lazy miller who|a shepherd who|two sisters who|a one-eyed pirate who",
        "danced with the moon|lost a golden button|sailed to the edge of the world",
    ),
}


def make_needle(number: int, rng: random.Random) -> Needle:
    """A needle of the kind whose turn it is at ``number``, filled in at random.

    Example:
        >>> make_needle(1, random.Random(0)).question
        'What is the best thing to do in Larkminster?'
    """
    sentence, question = _KINDS[number % len(_KINDS)]
    words = {slot: rng.choice(choices) for slot, choices in _FILL.items()}
    words["NUMBER"] = "-".join(str(rng.randrange(10, 100)) for _ in range(3))
    slot = next(field for field in re.findall(r"{(\w+)}", sentence) if field.isupper())
    return Needle(sentence.format(**words), question.format(**words), words[slot])


def recall(answer: str, response: str) -> float:
    """ROUGE-1 recall: the share of the answer's words that the response has.

    Example:
        >>> recall("under the old bridge", "It is under a bridge.")
        0.5
    """
    wanted, given = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, response))
    return sum((wanted & given).values()) / sum(wanted.values())
