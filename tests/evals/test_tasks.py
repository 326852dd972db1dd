"""Tasks made on the spot: the answers are there, the prompts fit, and the same seed gives the same."""

import json
import re
from collections import Counter

import pytest

from kvec_jax.calibrate.settings import Text
from kvec_jax.evals.example import Example, make_prompt
from kvec_jax.evals.tasks import MADE, make_tasks
from tests.evals.tiny import Letters, story

LENGTH = 6000  # characters, with that tokenizer


def made(name, seed=0, examples=3):
    (task,) = make_tasks([name], Letters(), story(), [LENGTH], examples, seed)
    return task.examples


@pytest.mark.parametrize("name", MADE)
def test_of_every_task(name):
    examples = made(name)
    assert examples == made(name) and examples != made(name, seed=1)
    assert len({example.name for example in examples}) == 3
    for example in examples:
        prompt = make_prompt(Letters(), example, 10**6)
        assert 0.85 * LENGTH < len(prompt.tokens) <= LENGTH
        assert 0 < prompt.split <= len(prompt.tokens) and prompt.gold
        assert all(answer in example.context for answer in example.answers)


@pytest.mark.parametrize("name", ["needle", "passkey", "kv", "lines"])
def test_depths(name):
    examples = made(name, examples=4)
    assert [example.depth for example in examples] == [0.125, 0.375, 0.625, 0.875]
    for example in examples:
        sought = json.dumps(example.answers[0]) if name == "kv" else example.answers[0]
        assert example.context.index(sought) / len(example.context) == pytest.approx(example.depth, abs=0.08)


def test_variables_are_a_chain():
    (example, *_) = made("variables")
    number = re.search(r"\d{5}", example.question)[0]
    holds = {number}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", example.context):
        if value in holds:
            holds.add(name)
    assert holds == {number, *example.answers}


def test_counted_words_are_the_most_common():
    for name, most in ("common_words", 5), ("frequent_words", 3):
        for example in made(name):
            words = re.findall(r"[a-z]\w+", example.context)
            counts = [count for _, count in Counter(words).most_common(most + 1)]
            assert {word for word, _ in Counter(words).most_common(most)} == set(example.answers)
            assert counts[-2] > counts[-1]


def test_refused():
    with pytest.raises(ValueError, match="unknown task 'nedle'; did you mean 'needle'"):
        make_tasks(["nedle"], Letters(), story(), [LENGTH], 1, 0)
    with pytest.raises(ValueError, match="text: expected at least 6200 tokens"):
        make_tasks(["needle"], Letters(), Text("short", "x"), [LENGTH], 1, 0)
    with pytest.raises(ValueError, match="lengths: 40 tokens are too few"):
        make_tasks(["kv"], Letters(), story(), [40], 1, 0)


class Chat(Letters):
    chat_template = "some"

    def render_chat(self, messages):
        return f"<user>{messages[0]['content']}</user><assistant>"


def plain(**fields):
    defaults = dict(
        name="0", context="Owls hoot.", question="What?", answers=("hoot",), metric="found", max_new_tokens=4
    )
    return Example(**(defaults | fields))


def test_prompt_is_split_where_the_question_begins():
    prompt = make_prompt(Chat(), plain(), 100)
    whole = "<user>Owls hoot.\n\nWhat?</user><assistant>"
    assert prompt.tokens == Letters().encode(whole)
    assert prompt.split == len("<user>Owls hoot.\n\n")
    assert prompt.gold == Letters().encode("hoot")
    prefixed = make_prompt(Chat(), plain(answer_prefix="They"), 100)
    assert prefixed.tokens == Letters().encode(whole + "They") and prefixed.gold == Letters().encode(" hoot")


def test_prompts_of_other_kinds():
    raw = make_prompt(Chat(), plain(chat=False), 100)
    assert raw.tokens == Letters().encode("Owls hoot.\n\nWhat?") and raw.split == len("Owls hoot.")
    whole = make_prompt(Chat(), plain(context=None, question="All of it"), 100)
    assert whole.tokens == Letters().encode("<user>All of it</user><assistant>") and whole.split == 0
    assert make_prompt(Chat(), plain(gold="x" * 500), 100).gold == Letters().encode("x" * 64)


def test_the_middle_of_long_contexts_is_left_out():
    example = plain(context="".join(chr(97 + i % 26) for i in range(200)))
    whole, cut = (make_prompt(Chat(), example, most) for most in (1000, 100))
    question = len(whole.tokens) - whole.split
    assert len(cut.tokens) == 100 and len(cut.tokens) - cut.split == question
    first = (cut.split + 1) // 2
    assert cut.tokens[:first] == whole.tokens[:first]
    assert cut.tokens[first:] == whole.tokens[-(100 - first) :]
    with pytest.raises(ValueError, match="the question alone has more than 20 tokens"):
        make_prompt(Chat(), example, 20)
