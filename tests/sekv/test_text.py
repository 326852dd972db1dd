"""SeKV where text goes in and comes out: as any other policy."""

import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.policies.options import make_policy
from kvec_jax.testing import tiny_language_model

POLICY = kv.SeKV(0.3, min_span=8)
PROMPTS = ["some words " * n for n in (20, 17, 19)]  # of one bucket: the same program reads each


@pytest.fixture(scope="module")
def lm():
    return tiny_language_model(num_hidden_layers=2)


@pytest.mark.slow
def test_a_batch_of_prompts_is_as_each_alone(lm):
    together = lm.generate(PROMPTS, policy=POLICY, max_new_tokens=6)
    for prompt, output in zip(PROMPTS, together, strict=True):
        assert lm.generate(prompt, policy=POLICY, max_new_tokens=6).tokens == output.tokens


def test_sampling_goes_through_the_same_step(lm):
    import jax

    outputs = [
        lm.generate(PROMPTS[0], policy=POLICY, max_new_tokens=6, sampler=kv.Sample(), key=jax.random.key(seed))
        for seed in (0, 0, 1)
    ]
    assert outputs[0].tokens == outputs[1].tokens != outputs[2].tokens
    stats = outputs[0].stats
    assert stats.cache_bytes <= 0.3 * stats.full_cache_bytes
    assert stats.host_bytes > 0 and stats.moved_bytes > 0


@pytest.mark.slow
def test_questions_about_one_context(lm):
    context = lm.compress(PROMPTS[0], POLICY)
    questions = ["who?", "where is it?"]
    answers = lm.ask(context, questions, max_new_tokens=5)
    for question, answer in zip(questions, answers, strict=True):
        assert lm.ask(context, question, max_new_tokens=5).tokens == answer.tokens
    assert np.all(np.asarray(context.cache.beyond.slot_spans) == -1)  # the context never changes


def test_a_context_is_not_saved(lm, tmp_path):
    with pytest.raises(kv.UnsupportedError):
        lm.compress(PROMPTS[0], POLICY).save(tmp_path / "x.kv")
    assert not list(tmp_path.iterdir())


def test_it_is_known_by_name():
    assert make_policy("sekv", settings=[("device_share", 0.2)]) == kv.SeKV(0.2)
