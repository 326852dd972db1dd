"""Head scores and eviction errors against plain attention in numpy, written from the paper's formulas."""

import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.calibrate.heads import answer_scores, rank_heads
from kvec_jax.calibrate.layers import eviction_errors, layer_weights
from kvec_jax.calibrate.replay import pad
from kvec_jax.policies.compresskv import RetrievalHeads
from kvec_jax.testing import tiny_model
from tests.oracle.forward import attend, forward, visible, weights

# The second ends its answers early: token 2 is an end token.
MODELS = {
    "llama": {},
    "windows": dict(
        model_type="gemma3_text",
        num_hidden_layers=6,
        sliding_window=16,
        local_layers=(0, 1, 3, 4),
        post_norms=True,
        eos_token_ids=(2,),
    ),
}
NEW = 10


def model_of(name):
    return tiny_model(vocab_size=24, **MODELS[name])


def compressing(model):
    return [layer for layer in range(model.config.num_hidden_layers) if layer not in model.config.local_layers]


def some_prompts(questions):
    """The same text, then questions of these lengths."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, 24, 70).tolist()
    return [text + [i % 24] + rng.integers(0, 24, length - 1).tolist() for i, length in enumerate(questions)]


SPANS = [(10, 17), (0, 4), (50, 69)]


@pytest.mark.parametrize("name", ["llama", pytest.param("windows", marks=pytest.mark.slow)])
def test_head_scores(name):
    model = model_of(name)
    config, w = model.config, weights(model)
    prompts = some_prompts([5, 1, 9])
    answers, scores = answer_scores(model, prompts, SPANS, length=80, new=NEW)
    for prompt, (start, end), answer, score in zip(prompts, SPANS, answers, scores, strict=True):
        trace = forward(config, w, prompt + answer)
        expected = np.zeros((config.num_hidden_layers, config.num_attention_heads))
        for step, token in enumerate(answer):
            asking = len(prompt) - 1 + step  # whose query predicts the token
            assert token == trace.logits[asking].argmax()
            if token in prompt[start:end]:
                expected += [attention[:, asking, start:end].sum(axis=-1) for attention in trace.attention]
        np.testing.assert_allclose(score, expected[compressing(model)], rtol=1e-4, atol=1e-5)
    assert scores.max() > 0.1


def policy_for(model, budget):
    heads = tuple((i % 8, (i + 3) % 8) for i in range(len(compressing(model))))
    return kv.Policy(scorer=RetrievalHeads(heads=heads, window=4), budget=budget)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "windows"])
def test_eviction_errors(name):
    model = model_of(name)
    prompts, policy = some_prompts([5, 12]), policy_for(model, 12)
    errors = eviction_errors(model, prompts, policy, length=90, new=NEW)
    config, w = model.config, weights(model)
    tokens, lengths = pad(prompts, 90)
    _, cache = kv.prefill(model, tokens, lengths, policy)
    for i, (prompt, row) in enumerate(zip(prompts, errors, strict=True)):
        T, answer = len(prompt), []
        while len(answer) < NEW and not set(answer) & set(config.eos_token_ids):
            answer.append(int(forward(config, w, prompt + answer).logits[-1].argmax()))
        trace = forward(config, w, prompt + answer)
        for layer, error in zip(compressing(model), row, strict=True):
            parts = trace.queries[layer], trace.keys[layer], trace.values[layer]
            outputs = []
            for kept in (None, cache.kept_positions(i)):
                allowed = visible(config, layer, T + len(answer), kept, T)
                heads, _ = attend(*parts, config.scale, allowed)
                outputs.append(np.einsum("ntd,ndm->tm", heads, trace.output[layer])[T:])
            right, wrong = outputs
            expected = np.linalg.norm(right - wrong, axis=-1) / (np.linalg.norm(right, axis=-1) + 1e-6)
            assert error == pytest.approx(expected.mean(), rel=1e-3)


def test_no_error_where_nothing_is_evicted():
    model = model_of("llama")
    errors = eviction_errors(model, some_prompts([5, 12]), policy_for(model, 90), length=90, new=NEW)
    np.testing.assert_allclose(errors, 0, atol=1e-6)


def test_heads_are_ranked_by_score_then_number():
    scores = np.array([[0.2, 0.5, 0.5, 0.7], [0.0, 0.0, 0.0, 1e-6]])
    assert rank_heads(scores) == ((3, 1, 2, 0), ())


def test_every_kind_of_prompt_has_the_same_say():
    rows = {"a": [np.array([1.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])], "b": [np.array([40.0, 0.0, 40.0])]}
    np.testing.assert_allclose(layer_weights(rows), [0.375, 0.125, 0.5])
    np.testing.assert_allclose(layer_weights({"a": [np.zeros(4)]}), 0.25)
