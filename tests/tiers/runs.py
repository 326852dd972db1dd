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
# Room for so many new tokens in any run, so that runs of different lengths share their programs.
ROOM = 16


def tiered(**settings) -> Tiered:
    """A policy that suits tiny models: 8 tokens a block, 4 sinks, 16 recent; micro-batches take turns."""
    return Tiered(**(dict(recent=16, budget=0.25, micro_batches=2) | settings))


def run(
    policy, steps, *, lengths=LENGTHS, padded=T, new=NEW, done=None, changes=None, recorder=None, after_step=None,
    dtype=jnp.float32,
):  # fmt: skip
    """Logits float32 [B, steps, V] of the first ``new`` tokens, and the closed decoder."""
    model, _ = model_of(dtype=dtype, **(changes or {}))
    tokens, lengths = batch(lengths, padded)
    _, decoder = read_prompts(model, tokens, lengths, policy, max(steps + 1, ROOM), recorder or Recorder())
    done = np.zeros(len(lengths), bool) if done is None else done
    logits = []
    with decoder:
        for step in range(steps):
            hidden = decoder.step(new[: len(lengths), step], done)
            logits.append(np.concatenate([np.asarray(model.unembed(h)) for h in hidden]))
            if after_step:
                after_step(decoder)
    return np.stack(logits, axis=1), decoder


@functools.cache
def expected(row, steps, budget=1.0, lengths=LENGTHS, sinks=4, recent=16, P=8, flush=1024, clustered=False, **changes):
    """Logits [steps, V] of a row by the oracle, each new token seeing the blocks that it should choose."""
    model, w = model_of(**changes)
    config, length = model.config, lengths[row]
    first = min(length, sinks)

    def blocks_at(position):
        return max(length + (position - length) // flush * flush - first - recent, 0) // P

    def wanted(count):
        return min(max(int(count * budget + 1e-4), 1) if isinstance(budget, float) else budget // P, count)

    def allow(layer, queries, keys, allowed):
        if layer in config.local_layers:
            return allowed
        allowed = allowed.copy()
        for head in range(config.num_key_value_heads):
            members = first + np.arange(keys.shape[1])
            if clustered:
                prompt_keys = keys[head, first : first + blocks_at(length) * P]
                members[: len(prompt_keys)] = first + cluster_order(prompt_keys, P)
            for at in range(length, keys.shape[1]):
                count = blocks_at(at)
                if not count:
                    continue
                blocks = members[: count * P].reshape(count, P)
                means = keys[head, blocks].mean(axis=1)
                mine = queries[head * config.groups : (head + 1) * config.groups, at]
                scores = softmax(mine @ means.T * config.scale).sum(axis=0)
                for block in np.argsort(-scores, kind="stable")[wanted(count) :]:
                    allowed[head, at, blocks[block]] = False
        return allowed

    text = [*prompt(length), *NEW[row, :steps].tolist()]
    return forward(config, w, text, allow=allow).logits[length:]


def cluster_order(keys, per):
    """Indices of ``keys`` [n, D], cluster by cluster: k-means with unit centroids, seeded evenly, ten rounds."""
    if not len(keys):
        return np.arange(0)
    count = max(len(keys) // per, 1)
    keys = keys - keys.mean(axis=0)
    centroids = keys[np.arange(count) * len(keys) // count]
    for _ in range(10):
        mine = np.argmax(keys @ (centroids / np.linalg.norm(centroids, axis=1, keepdims=True)).T, axis=1)
        groups = (keys[mine == number] for number in range(count))
        centroids = np.stack([g.mean(axis=0) if len(g) else old for g, old in zip(groups, centroids, strict=True)])
    return np.argsort(np.argmax(keys @ centroids.T, axis=1), kind="stable")
