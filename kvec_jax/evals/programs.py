"""The compiled steps of an evaluation, with a clock that leaves compilation out."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvec_jax.cache import CompressedKV
from kvec_jax.extend import run_extend
from kvec_jax.generate import run_decode
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies import Policy
from kvec_jax.policies.prepared import prepare
from kvec_jax.prefill import run_prefill
from kvec_jax.sampling import Greedy
from kvec_jax.sweep import run_sweep
from kvec_jax.typing import Array


class Programs:
    """Steps for one model; each is compiled once for every shape."""

    def __init__(self, model: Transformer):
        self._model = model
        self._compiled = {}

    def read(
        self, policies: tuple[Policy, ...], tokens: Array, lengths: Array, reserve: int
    ) -> tuple[tuple[Array, tuple[CompressedKV, ...]], float]:
        """Logits of each prompt's last token and a cache for each policy, from one reading; and seconds."""
        prepared = tuple(prepare(policy, self._model) for policy in policies)
        return self._run(_read, (prepared, tokens, lengths), policies=policies, reserve=reserve)

    def ask(self, cache: CompressedKV, tokens: Array, lengths: Array) -> tuple[tuple[Array, CompressedKV], float]:
        """Logits after a question, the cache with it, and seconds."""
        return self._run(_ask, (cache, tokens, lengths))

    def follow(
        self, cache: CompressedKV, logits: Array, tokens: Array, lengths: Array, reference: Array | None
    ) -> tuple[tuple[Array, dict[str, Array]], float]:
        """Log-probabilities float32 [B, C, V] before each token of a given text, what is measured, and seconds.

        ``reference`` are the log-probabilities that the full cache gives; ``None`` for the full cache itself.
        """
        return self._run(_follow, (cache, logits, tokens, lengths, reference))

    def measure(self, logits: Array, tokens: Array, lengths: Array, reference: Array) -> tuple[dict[str, Array], float]:
        """What ``follow`` measures, of ``logits`` [B, C, V] before each of the tokens; and seconds."""
        return self._run(_measure, (logits, tokens, lengths, reference))

    def answer(self, cache: CompressedKV, logits: Array, new: int) -> tuple[Array, float]:
        """The ``new`` most likely tokens int32 [B, new], ended as the model ends, and seconds."""
        return self._run(_answer, (cache, logits), new=new)

    def _run(self, step: Callable, arguments: tuple, **static) -> tuple[Any, float]:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        key = step, structure, shapes, tuple(sorted(static.items()))
        if key not in self._compiled:
            self._compiled[key] = step.lower(self._model, *arguments, **static).compile()
        began = time.perf_counter()
        result = jax.block_until_ready(self._compiled[key](self._model, *arguments))
        return result, time.perf_counter() - began


@functools.partial(jax.jit, static_argnames=("policies", "reserve"))
def _read(model, prepared, tokens, lengths, policies, reserve):
    if len(policies) == 1:  # also for policies that read prompts in their own way
        logits, cache = run_prefill(model, prepared[0], tokens, lengths, policies[0], reserve)
        return logits, (cache,)
    return run_sweep(model, prepared, tokens, lengths, policies, reserve)


@jax.jit
def _ask(model, cache, tokens, lengths):
    return run_extend(model, cache, tokens, lengths)


@jax.jit
def _follow(model, cache, logits, tokens, lengths, reference):
    later, _ = run_extend(model, cache, tokens, lengths, all_logits=True)
    # The logits before each token: those of the prompt, then those of the tokens before it.
    logits = jnp.concatenate([logits[:, None], later[:, :-1]], axis=1)
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    reference = log_probabilities if reference is None else reference
    return log_probabilities, _compare(log_probabilities, tokens, lengths, reference)


@jax.jit
def _measure(model, logits, tokens, lengths, reference):
    return _compare(jax.nn.log_softmax(logits, axis=-1), tokens, lengths, reference)


def _compare(log_probabilities, tokens, lengths, reference):
    real = jnp.arange(tokens.shape[1]) < lengths[:, None]

    def mean(values):
        return jnp.sum(jnp.where(real, values, 0), axis=-1) / jnp.maximum(lengths, 1)

    gold = jnp.take_along_axis(log_probabilities, tokens[..., None], axis=-1)[..., 0]
    divergence = jnp.sum(jnp.exp(reference) * (reference - log_probabilities), axis=-1)
    agree = jnp.argmax(log_probabilities, axis=-1) == jnp.argmax(reference, axis=-1)
    return {"nll": mean(-gold), "kl": mean(divergence), "agreement": mean(agree)}


@functools.partial(jax.jit, static_argnames="new")
def _answer(model, cache, logits, new):
    ends = model.config.eos_token_ids
    return run_decode(model, cache, logits, Greedy(), jax.random.key(0), new, ends).tokens
