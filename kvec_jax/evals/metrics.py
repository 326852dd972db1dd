"""How right an answer is: the metrics of LongBench and RULER, from 0 to 1.

The rules are those of LongBench's evaluation (https://arxiv.org/abs/2308.14508) and RULER's
(https://arxiv.org/abs/2404.06654), their oddities included, so that numbers can be compared with published ones.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from kvec_jax.evals.example import Example

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(example: Example, answer: str) -> float:
    """How right an answer to an example is: by the best of its right answers, where they are alternatives.

    Raises:
        ValueError, ImportError: As ``find`` does.
    """
    if example.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return find(example.metric)(answer, example.answers, example.classes)


def find(name: str) -> Callable[[str, Sequence[str], Sequence[str]], float]:
    """The metric of a name: called with an answer, the right answers, and all labels.

    Raises:
        ValueError: If there is none; it lists those there are.
        ImportError: If it needs a library that isn't there; it names the extra.
    """
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}. Known: {', '.join(sorted(METRICS))}")
    if name == "rouge_l":
        _rouge()
    return METRICS[name]


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles and surplus space.

    Example:
        >>> normalize("The  Cat's a-Z, an owl!")
        'cats az owl'
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(answer: str, right: str) -> float:
    """F1 of the words that two texts have in common, after ``normalize``.

    Example:
        >>> token_f1("It was the red fox.", "red fox")
        0.6666666666666666
    """
    given, wanted = (Counter(normalize(text).split()) for text in (answer, right))
    same = sum((given & wanted).values())
    if not same:
        return 0.0
    precision, recall = same / sum(given.values()), same / sum(wanted.values())
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, right: str) -> float:
    """ROUGE-L F1 as the package ``rouge`` has it, which LongBench uses: over sentences that end with full stops.

    Raises:
        ImportError: If the package isn't there; it names the extra.
    """
    rouge = _rouge()
    if not all(re.search(r"[^.\s]", text) for text in (answer, right)):
        return 0.0
    try:
        return rouge.get_scores(answer, right)[0]["rouge-l"]["f"]
    except RecursionError:  # sentences of about a thousand words, where LongBench counts 0
        return 0.0


def _rouge():
    try:
        from rouge import Rouge
    except ImportError as error:
        raise ImportError("ROUGE-L needs the package rouge: pip install 'kvec-jax[eval]'") from error
    return Rouge(metrics=["rouge-l"])


def classification(answer: str, right: str, classes: Sequence[str]) -> float:
    """One over the number of labels that the answer names, if the right one is among them.

    A label that is part of the right one isn't counted, unless it stands right after another such: LongBench takes
    labels out of the list that it walks along.
    """
    named = [label for label in classes if label in answer]
    for label in named:
        if label in right and label != right:
            named.remove(label)  # and the next label is skipped, as in LongBench
    return 1 / len(named) if right in named else 0.0


def edit_similarity(answer: str, right: str) -> float:
    r"""Similarity of the first line that looks like code, in whole per cent, to the right line.

    Example:
        >>> edit_similarity("# a comment\nreturn x", "return y")
        0.88
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, right).ratio()) / 100


def count(answer: str, right: str) -> float:
    """Share of the numbers in an answer that are the right one."""
    return _share(answer, right)


def retrieval(answer: str, right: str) -> float:
    """Share of the numbers in an answer that are the number of the right paragraph, such as ``"Paragraph 7"``."""
    paragraph = re.search(r"Paragraph (\d+)", right)
    return _share(answer, paragraph[1] if paragraph else right)


def _share(answer: str, right: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def found(answer: str, answers: Sequence[str]) -> float:
    """Share of the right answers that an answer holds, whatever the case: RULER's, for all tasks but questions.

    Example:
        >>> found("Both Ash and oak.", ["ash", "elm"])
        0.5
    """
    return sum(right.lower() in answer.lower() for right in answers) / len(answers)


def _best(metric: Callable[[str, str], float]):
    return lambda answer, answers, classes: max(metric(answer, right) for right in answers)


METRICS: dict[str, Callable[[str, Sequence[str], Sequence[str]], float]] = {
    "qa_f1": _best(token_f1),
    "rouge_l": _best(rouge_l),
    "edit_sim": _best(edit_similarity),
    "count": _best(count),
    "retrieval": _best(retrieval),
    "classification": lambda answer, answers, classes: max(classification(answer, x, classes) for x in answers),
    "found": lambda answer, answers, classes: found(answer, answers),
    "found_any": lambda answer, answers, classes: float(found(answer, answers) > 0),
}
