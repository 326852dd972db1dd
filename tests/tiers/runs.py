"""Runs over tiers with given new tokens, and what the oracle says of them."""

import functools

import jax.numpy as jnp
import numpy as np

from kvec_jax.tiers.decoder import read_prompts
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.recorder import Recorder
from tests.oracle.forward import forward, softmax
from tests.prompts import batch, model_of, prompt

LENGTHS, T = (200, 77, 3, 150), 256
NEW = np.random.default_rng(5).integers(1, 255, size=(4, 64)).astype(np.int32)


def tiered(**settings) -> Tiered:
    """A policy that suits tiny models: 8 tokens a block, 4 sinks, 16 recent."""
    return Tiered(**(dict(recent=16, budget=0.25) | settings))


def run(policy, steps, *, lengths=LENGTHS, done=None, changes=None, recorder=None, after_step=None, dtype=jnp.float32):
    """Logits float32 [B, steps, V] of the first NEW tokens, and the closed decoder."""
    model, _ = model_of(dtype=dtype, **(changes or {}))
    tokens, lengths = batch(lengths, T)
    _, decoder = read_prompts(model, tokens, lengths, policy, steps + 1, recorder or Recorder())
    done = np.zeros(len(lengths), bool) if done is None else done
    logits = []
    with decoder:
        for step in range(steps):
            hidden = decoder.step(NEW[: len(lengths), step], done)
            logits.append(np.concatenate([np.asarray(model.unembed(h)) for h in hidden]))
            if after_step:
                after_step(decoder)
    return np.stack(logits, axis=1), decoder


@functools.cache
def expected(row, steps, budget=1.0, lengths=LENGTHS, sinks=4, recent=16, P=8, **changes):
    """Logits [steps, V] of a row by the oracle, each new token seeing the blocks that it should choose."""
    model, w = model_of(**changes)
    config, length = model.config, lengths[row]
    count = max(length - sinks - recent, 0) // P
    wanted = min(max(int(count * budget + 1e-4), 1), count) if isinstance(budget, float) else min(budget // P, count)

    def allow(layer, queries, keys, allowed):
        if layer in config.local_layers or not count:
            return allowed
        allowed = allowed.copy()
        for head in range(config.num_key_value_heads):
            means = keys[head, sinks : sinks + count * P].reshape(count, P, -1).mean(axis=1)
            for at in range(length, keys.shape[1]):
                mine = queries[head * config.groups : (head + 1) * config.groups, at]
                scores = softmax(mine @ means.T * config.scale).sum(axis=0)
                for block in np.argsort(-scores, kind="stable")[wanted:]:
                    allowed[head, at, sinks + block * P : sinks + (block + 1) * P] = False
        return allowed

    text = [*prompt(length), *NEW[row, :steps].tolist()]
    return forward(config, w, text, allow=allow).logits[length:]
