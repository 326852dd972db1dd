"""Needles, and the prompts in which they are hidden."""

import random

import pytest

from kvec_jax.calibrate.haystack import Haystack
from kvec_jax.calibrate.needles import make_needle, recall
from tests.calibrate.tiny import text


class Words:
    """A token for each word or mark, spaces belonging to the word after them, as in most models' tokenizers."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template
        self.ids = {}

    def encode(self, text, add_special_tokens=False):
        import re

        parts = re.findall(r" ?\w+|[^\w]", text)
        return [self.ids.setdefault(part, len(self.ids)) for part in (["<s>"] if add_special_tokens else []) + parts]

    def decode(self, ids):
        parts = {number: part for part, number in self.ids.items()}
        return "".join(parts[number] for number in ids)

    def render_chat(self, messages):
        return f"<s>[{messages[0]['content']}]"


@pytest.mark.parametrize("number", range(12))
def test_a_needle_holds_its_answer_once(number):
    needle = make_needle(number, random.Random(number))
    assert needle.sentence.count(needle.answer) == 1 and needle.answer not in needle.question
    assert "{" not in needle.sentence + needle.question
    assert recall(needle.answer, needle.sentence) == 1.0
    assert recall(needle.answer, needle.question) < 0.5


def test_there_are_several_kinds_and_fillings():
    needles = [make_needle(number, random.Random(number)) for number in range(60)]
    assert len({needle.question.split()[0] + needle.question.split()[1] for needle in needles}) >= 4
    assert len({needle.answer for needle in needles}) > 30


@pytest.mark.parametrize("template", [None, "chat"])
@pytest.mark.parametrize("length", [200, 333])
def test_prompts_are_as_long_as_wanted_and_spans_hold_the_answers(template, length):
    tokenizer = Words(template)
    haystack = Haystack(tokenizer, text().text)
    for seed in range(5):
        needles = [make_needle(seed + i, random.Random(seed + i)) for i in range(4)]
        questions = [needle.question for needle in needles]
        prompts, spans = haystack.prompts(length, questions, needles, random.Random(seed))
        for prompt, question in zip(prompts, questions, strict=True):
            assert length - 90 <= len(prompt) <= length
            assert question in tokenizer.decode(prompt)
            for needle, span in zip(needles, spans, strict=True):
                assert tokenizer.decode(prompt[slice(*span)]) == f" {needle.answer}"
        assert spans == sorted(spans)  # needles in their order, each in its share of the text
        assert [prompts, spans] == list(haystack.prompts(length, questions, needles, random.Random(seed)))


def test_a_length_without_room():
    needle = make_needle(0, random.Random(0))
    with pytest.raises(ValueError, match="lengths: 20 tokens are too few"):
        Haystack(Words(), text().text).prompts(20, [needle.question], [needle], random.Random(0))


def test_paragraphs_without_end_are_cut():
    needle = make_needle(0, random.Random(0))
    prompts, _ = Haystack(Words(), "endless words " * 3000).prompts(300, ["Why?"], [needle], random.Random(0))
    assert 200 < len(prompts[0]) <= 300


def test_recall_counts_words():
    assert recall("the red house", "The HOUSE, the house") == pytest.approx(2 / 3)
    assert recall("a b", "") == 0.0
