"""Contexts: questions share one cache, which stays as it was; answers are those of the whole prompt read at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax import contexts
from kvec_jax.implementations import resolve
from kvec_jax.testing import tiny_language_model

DOCUMENT = "The ship's log. " + " ".join(f"Day {i}: wind from the {'NESW'[i % 4]}." for i in range(20))
QUESTIONS = ["Who?", "How strong was the wind on the ninth day?", "Zoë's?"]
SYSTEM = {"role": "system", "content": "Be brief."}
POLICIES = {
    "snapkv": kv.SnapKV(48, window=8),
    "model scope": kv.LaProx(48, window=8),
    "local": kv.SnapKV(48, window=8),
}
ALL = POLICIES | {"full": kv.FullCache()}
CHANGES = {"local": dict(sliding_window=8, local_layers=(0, 2))}


@functools.cache
def lm(name: str = "", chat: bool = True) -> kv.LanguageModel:
    return tiny_language_model(chat=chat, **CHANGES.get(name, {}))


@functools.cache
def context(name: str = "snapkv") -> kv.Context:
    return lm(name).compress(DOCUMENT, ALL[name])


def ask(name, question, ctx=None, **settings):
    return lm(name).ask(ctx or context(name), question, max_new_tokens=12, eos_token_ids=(), **settings)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def whole(model, prompt):
    return model.generate(prompt, max_new_tokens=12, eos_token_ids=()).tokens


def test_answers_from_a_full_cache_are_those_to_the_whole_prompt():
    prompts = [[user(f"{DOCUMENT}\n\n{question}")] for question in QUESTIONS[:2]]
    answers = ask("full", QUESTIONS[:2])
    assert [answer.tokens for answer in answers] == [whole(lm(), prompt) for prompt in prompts]
    assert answers[0].text == lm().tokenizer.decode(answers[0].tokens)
    assert answers[0].stats.prompt_tokens == len(lm().encode(prompts[0]))


@pytest.mark.parametrize("name", POLICIES)
def test_many_questions_are_each_of_them_alone_and_the_context_stays(name):
    before = jax.tree.map(np.array, context(name).cache)
    together = ask(name, QUESTIONS)
    alone = [ask(name, question) for question in QUESTIONS]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert len({tuple(answer.tokens) for answer in alone}) > 1
    jax.tree.map(np.testing.assert_array_equal, before, context(name).cache)


def test_questions_do_not_copy_what_was_kept():
    cache, B = context().cache, 16
    tokens, lengths = jnp.ones((B, 64), jnp.int32), jnp.full((B,), 64)
    arguments = lm().model, cache, tokens, lengths, kv.Greedy(), jax.random.key(0), 64, (), resolve(None, lm().model)
    state = contexts._begin(*arguments)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.cache)]
    assert not any(cache.keys.shape[1] in shape for shape in shapes)
    memory = contexts._begin.lower(*arguments).compile().memory_analysis()
    tails = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    assert memory.output_size_in_bytes < 1.1 * tails


def test_an_answer_can_be_followed_as_it_comes():
    pieces = [[], []]
    answers = ask("snapkv", QUESTIONS[:2], stream=lambda row, text: pieces[row].append(text))
    assert ["".join(row) for row in pieces] == [answer.text for answer in answers]
    single = []
    assert "".join(single) == "" and ask("snapkv", "Who?", stream=single.append).text == "".join(single)


def test_samples_follow_their_own_keys():
    keys = jax.random.split(jax.random.key(3), 2)
    sampler = kv.Sample(temperature=1.5)
    together = ask("snapkv", ["Who?"] * 2, sampler=sampler, key=keys)
    assert together[0].tokens != together[1].tokens
    assert ask("snapkv", "Who?", sampler=sampler, key=keys[1:]).tokens != together[0].tokens


def test_turns_are_added_and_the_old_context_stays():
    old = context("full")
    longer = lm().extend(old, [user("Who?"), said("The captain."), user("Why?"), said("Wind.")])
    prompt = [user(f"{DOCUMENT}\n\nWho?"), said("The captain."), user("Why?"), said("Wind."), user("Sure?")]
    assert ask("full", "Sure?", longer).tokens == whole(lm(), prompt)
    assert longer.tokens > old.tokens and longer.document_tokens == old.document_tokens
    assert ask("full", "Sure?").tokens == whole(lm(), [user(f"{DOCUMENT}\n\nSure?")])


def test_more_of_the_document_can_be_added():
    longer = lm().extend(lm().extend(context("full"), "Day 20: calm."), "Day 21: calm.\n")
    prompt = [user(f"{DOCUMENT}\n\nDay 20: calm.\n\nDay 21: calm.\n\nWho?")]
    assert ask("full", "Who?", longer).tokens == whole(lm(), prompt)


def test_a_system_prompt_may_come_first():
    ctx = lm().compress([SYSTEM, user(DOCUMENT)], kv.FullCache())
    assert ask("full", "Who?", ctx).tokens == whole(lm(), [SYSTEM, user(f"{DOCUMENT}\n\nWho?")])


@pytest.mark.parametrize("model, chat", [(lm(chat=False), None), (lm(), False)])
def test_without_a_chat_the_text_simply_goes_on(model, chat):
    ctx = model.compress(DOCUMENT, kv.FullCache(), chat=chat)
    answer = model.ask(ctx, "Day 20", max_new_tokens=12, eos_token_ids=())
    assert answer.tokens == whole(model, f"{DOCUMENT}\n\nDay 20")


def test_a_context_says_what_it_is():
    text = repr(context())
    assert "SnapKV" in text or "snapkv" in text
    assert f"{context().tokens:,} tokens" in text and "'tiny'" in text


BAD = {
    "no document": (lambda m: m.compress("  \n", kv.FullCache()), "document: expected a text"),
    "bytes": (lambda m: m.compress(b"text", kv.FullCache()), "document: expected a string"),
    "too long": (
        lambda m: m.compress("word " * 500, kv.FullCache()),
        "document: .* the model's context of 2048",
    ),
    "assistant last": (lambda m: m.compress([user("a"), said("b")], kv.FullCache()), "the last is the user's"),
    "no policy": (lambda m: m.compress("text", "snapkv"), "policy: expected"),
    "no question": (lambda m: m.ask(context(), ""), "question: expected a text, got ''"),
    "no questions": (lambda m: m.ask(context(), []), "question: expected at least one"),
    "number": (lambda m: m.ask(context(), [1]), "question: expected a text, got 1"),
    "no tokens": (lambda m: m.ask(context(), "a", max_new_tokens=0), "max_new_tokens: expected"),
    "no room": (lambda m: m.ask(context(), "a", max_new_tokens=2000), "more than the model's context of 2048"),
    "cache": (lambda m: m.ask(context().cache, "a"), "context: expected what compress or load_context gave"),
    "swapped": (lambda m: m.ask("a", context()), "context: expected"),
    "no turn": (lambda m: m.extend(context(), " "), "turn: expected a text"),
    "half a turn": (lambda m: m.extend(context(), [user("a")]), "the last the assistant's"),
    "other order": (lambda m: m.extend(context(), [said("a"), user("b")]), "user and assistant in turn"),
    "other model": (lambda m: tiny_language_model(seed=1).ask(context(), "a"), "made with the model 'tiny'.*weights"),
    "other shape": (lambda m: lm("local").ask(context(), "a"), "other shapes"),
    "other dtype": (
        lambda m: tiny_language_model(dtype=jnp.bfloat16).ask(context(), "a"),
        "made in float32, and the model is in bfloat16: load it with that dtype",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call(lm())


def test_messages_need_a_chat():
    model = lm(chat=False)
    ctx = model.compress(DOCUMENT, kv.FullCache())
    with pytest.raises(ValueError, match="this context is no chat"):
        model.extend(ctx, [user("a"), said("b")])
    with pytest.raises(TypeError, match="in a chat"):
        model.compress([user("a")], kv.FullCache())


def test_a_template_that_rewrites_messages_is_refused():
    model = dataclasses.replace(lm(), tokenizer=tiny_language_model().tokenizer)
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(ValueError, match="the chat template changes what messages say"):
        model.compress(DOCUMENT, kv.FullCache())
