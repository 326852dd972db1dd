"""Metrics against values worked out by hand from the rules of LongBench and RULER."""

import builtins
import sys

import pytest

from kvec_jax.evals import metrics
from kvec_jax.evals.example import Example


def example(metric, answers, **fields):
    return Example(name="0", context="", question="", answers=tuple(answers), metric=metric, max_new_tokens=1, **fields)


@pytest.mark.parametrize(
    ("metric", "answer", "answers", "expected"),
    [
        # Articles and punctuation fall away, and so does the hyphen, which joins: "redfox" is no word of the other.
        ("qa_f1", "The red-fox!", ["a redfox"], 1.0),
        ("qa_f1", "The red fox.", ["red-fox"], 0.0),
        # "a" of "a.m." loses its full stops first and is the word "am"; only then are articles taken out.
        ("qa_f1", "at 5 a.m.", ["5 am"], 0.8),
        # Words count as often as they come: 2 of 4 given and 2 of 2 wanted.
        ("qa_f1", "no no no yes", ["no no"], 2 / 3),
        # Only ASCII punctuation: the quotation marks make another word.
        ("qa_f1", "“fox”", ["fox"], 0.0),
        ("qa_f1", "", ["fox"], 0.0),
        ("qa_f1", "the", ["a"], 0.0),  # nothing is left of either
        ("qa_f1", "third", ["first", "the third one"], 2 / 3),  # the best of several: 1 of 1 given, 1 of 2 wanted
        ("qa_f1", "第三", ["三"], 0.0),  # Chinese digits are words like others
        ("count", "There are 3 or 4, I say 3.", ["3"], 2 / 3),
        ("count", "three", ["3"], 0.0),
        ("count", "三", ["3"], 0.0),
        ("count", "３", ["3"], 0.0),  # a digit, but not that one
        ("count", "13", ["3"], 0.0),
        ("retrieval", "Paragraph 12, not 2", ["Paragraph 12"], 0.5),
        ("retrieval", "It is the 12th.", ["Paragraph 12"], 1.0),
        ("retrieval", "", ["Paragraph 12"], 0.0),
        ("edit_sim", "\n\n# first\n// second\n    return xs\nreturn ys", ["    return xs"], 1.0),
        ("edit_sim", "`code`", ["x = 1"], 0.0),
        ("edit_sim", "abcd", ["abxd"], 0.75),
        ("edit_sim", "abc", ["abcdef"], 0.67),  # 2 * 3 of 9, in whole per cent
        ("found", "It is WALRUS, or walruses", ["walrus", "owl"], 0.5),
        ("found", "", ["walrus"], 0.0),
        ("found_any", "an owl", ["walrus", "owl"], 1.0),
        ("found_any", "a bat", ["walrus", "owl"], 0.0),
    ],
)
def test_by_hand(metric, answer, answers, expected):
    assert metrics.score(example(metric, answers), answer) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("Number of something", "Number of something", 1.0),
        ("Type: Number", "Number of something", 0.0),
        ("Date or Location", "Date", 0.5),  # two labels, one of them right
        # "Number" is part of the right label, so it is not held against the answer.
        ("Number of something", "Number", 0.5),
        ("date", "Date", 0.0),  # the case counts
        ("", "Date", 0.0),
    ],
)
def test_labels(answer, right, expected):
    labels = ("Number", "Number of something", "Date", "Location")
    assert metrics.score(example("classification", [right], classes=labels), answer) == expected


def test_a_label_after_one_that_is_taken_out_stays():
    """LongBench walks along the list that it takes labels out of: of two parts of the right label the second stays."""
    labels = ("a", "b", "a b")
    assert metrics.score(example("classification", ["a b"], classes=labels), "a b") == 0.5


def test_only_the_first_line_counts_where_the_set_says_so():
    assert metrics.score(example("qa_f1", ["owl"], first_line=True), "\n\nowl\nQuestion: what else?") == 1
    assert metrics.score(example("qa_f1", ["owl"]), "owl\nQuestion: what else?") < 1


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("the cat lay", "the cat sat", 2 / 3),
        ("The cat", "the cat", 1 / 2),  # the case counts
        ("cat the", "the cat", 1 / 2),  # the longest common subsequence is one word
        ("a b. c d", "c d. a b", 1.0),  # sentence by sentence, in any order
        ("", "the cat", 0.0),
        (" . ", "the cat", 0.0),
    ],
)
def test_rouge(answer, right, expected):
    pytest.importorskip("rouge", reason="the extra eval is not installed")
    assert metrics.score(example("rouge_l", [right]), answer) == pytest.approx(expected, abs=1e-6)


def test_rouge_of_a_sentence_without_end_counts_nothing():
    pytest.importorskip("rouge", reason="the extra eval is not installed")
    assert metrics.rouge_l("word " * 2000, "another text") == 0


def test_missing_library_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "rouge":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "rouge", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'kvec-jax\[eval\]'"):
        metrics.rouge_l("a", "b")


def test_unknown_metric():
    with pytest.raises(ValueError, match="unknown metric 'bleu'. Known: classification, count"):
        metrics.score(example("bleu", ["x"]), "y")
