"""The three systems on the activations of a real model: what they keep is what the slow oracles keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvec_jax as kv
from kvec_jax.calibrate.file import load_calibration
from kvec_jax.demo import reference_text
from kvec_jax.models.transformer import Rotation
from kvec_jax.prefill import layer_inputs
from kvec_jax.prompt_attention import attend_prompt
from tests.models.test_real import load
from tests.oracle import budgets, policies
from tests.oracle.forward import Trace, softmax
from tests.prompts import as_lists

pytestmark = pytest.mark.slow

T, LENGTHS, BUDGET = 2048, (2000, 900, 100), 128


@jax.jit
def activations(model, tokens, lengths):
    """Queries and keys (rotated) and values of every layer, as the library computes them in float32."""
    rotation = Rotation(model.config, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))

    def layer(hidden, inputs):
        number, is_local, block = inputs
        queries, keys, values = block.project(hidden)
        queries, keys = (rotation(x, is_local, number) for x in (queries, keys))
        attended, _ = attend_prompt(queries, keys, values, lengths, scale=model.config.scale)
        return block.finish(hidden, attended), (queries, keys, values)

    return lax.scan(layer, model.embed(tokens), layer_inputs(model))[1]


@pytest.fixture(scope="module")
def prompts():
    loaded = load("smollm2-135m")
    model, config = loaded.model, loaded.model.config
    ids = loaded.tokenizer.encode(reference_text()[:60_000])
    tokens = np.zeros((len(LENGTHS), T), np.int32)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = ids[row * 3000 : row * 3000 + length]
    lengths = jnp.array(LENGTHS)
    output = np.asarray(model.layers.o_proj[...], np.float64).reshape(config.num_hidden_layers, 9, 64, -1)
    seen = [np.asarray(x) for x in activations(model, jnp.asarray(tokens), lengths)]
    traces = [trace_of(seen, row, length, output, config.scale) for row, length in enumerate(LENGTHS)]
    return model, jnp.asarray(tokens), lengths, traces


def trace_of(seen, row, length, output, scale):
    """The oracle's trace of a row; of the attention only the last 32 queries."""
    queries, keys, values = ([layer[row, :, :length].astype(np.float64) for layer in x] for x in seen)
    attention = []
    for q, k in zip(queries, keys, strict=True):
        rows = min(32, length)
        logits = q[:, -rows:] @ np.repeat(k, 3, axis=0).transpose(0, 2, 1) * scale
        allowed = np.arange(length) <= np.arange(length - rows, length)[:, None]
        attention.append(softmax(np.where(allowed, logits, -np.inf)))
    return Trace(None, queries, queries, keys, keys, values, attention, list(output))


def check(prompts, policy, oracle):
    model, tokens, lengths, traces = prompts
    _, cache = kv.prefill(model, tokens, lengths, policy)
    for row, trace in enumerate(traces):
        assert as_lists(cache.kept_positions(row)) == as_lists(oracle(trace))


def test_kvec(prompts):
    check(prompts, kv.KVec(BUDGET), lambda trace: policies.kvec(trace, BUDGET)[0])


def test_laprox(prompts):
    check(prompts, kv.LaProx(BUDGET), lambda trace: policies.laprox(trace, BUDGET))


def test_compresskv(prompts):
    calibration = load_calibration("smollm2-135m")
    heads = [list(layer[:4]) for layer in calibration.heads]

    def oracle(trace):
        length = trace.keys[0].shape[1]
        if length <= BUDGET:
            return policies.everything(trace)
        return policies.compresskv(trace, budgets.compresskv(calibration.layer_weights, BUDGET), heads)

    check(prompts, kv.CompressKV(BUDGET, calibration=calibration), oracle)
