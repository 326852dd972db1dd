"""One reading of a prompt, compressed in many ways: what a comparison of policies and budgets needs.

A prompt's own attention does not depend on what is kept of it, so several keepers can go with one scan over the layers.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvec_jax.arguments import check_count
from kvec_jax.cache import CompressedKV
from kvec_jax.checks import check_model, check_tokens
from kvec_jax.keeping import Keeper, Plan, keeper
from kvec_jax.limits import Limits, check_positions
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Transformer
from kvec_jax.placement import place_rows
from kvec_jax.policies.base import Observation, Policy
from kvec_jax.policies.prepared import prepare
from kvec_jax.prefill import as_cache, read_layers
from kvec_jax.spread import on_mesh
from kvec_jax.typing import Array


def sweep(
    model: Transformer, tokens: Array, lengths: Array, policies: Sequence[Policy], *, reserve: int = 0
) -> tuple[Array, tuple[CompressedKV, ...]]:
    """Runs the model over prompts once, and keeps what each of several policies chooses.

    The same as ``prefill`` with each policy, without reading the prompts again. All caches are held at the same time,
    beside one layer's keys and values.

    Args:
        model: The decoder.
        tokens: int32 [B, T], right-padded.
        lengths: int32 [B], real tokens of each row, 1 to T.
        policies: What to keep; one or more.
        reserve: Room in the tails, in tokens, for ``extend`` and ``decode``.

    Returns:
        Logits float32 [B, V] of each row's last token, and a cache for each policy.

    Raises:
        TypeError, ValueError: For tokens, lengths or a policy that can't be.

    Example:
        >>> import kvec_jax as kv
        >>> from kvec_jax.testing import tiny_model
        >>> policies = [kv.FullCache(), kv.SnapKV(40), kv.KVec(40)]
        >>> _, caches = kv.sweep(tiny_model(), jnp.arange(60)[None], jnp.array([60]), policies)
        >>> [cache.kept_positions(0)[3][1].size for cache in caches]
        [60, 40, 40]
    """
    check_model(model)
    policies = tuple(policies)
    if not policies:
        raise ValueError("policies: expected at least one, got none")
    for policy in policies:
        if not isinstance(policy, Policy):
            raise TypeError(
                f"policies: expected policies that choose rows, such as kvec_jax.SnapKV(256), got {policy!r}"
            )
    check_count("reserve", reserve, 0)
    tokens, lengths = check_tokens(model.config, tokens, lengths)
    check_positions("tokens", Limits(), policies[0], model.config, tokens.shape[1])
    tokens, lengths = place_rows(model.mesh, tokens=tokens, lengths=lengths)
    prepared = tuple(prepare(policy, model) for policy in policies)
    return _sweep(model, prepared, tokens, lengths, policies, reserve)


@functools.partial(jax.jit, static_argnames=("policies", "reserve"))
@on_mesh
def _sweep(model, prepared, tokens, lengths, policies, reserve):
    return run_sweep(model, prepared, tokens, lengths, policies, reserve)


def run_sweep(
    model: Transformer, prepared: tuple, tokens: Array, lengths: Array, policies: tuple[Policy, ...], reserve: int
) -> tuple[Array, tuple[CompressedKV, ...]]:
    """``sweep`` without checks, to be called under ``jit``; ``prepared`` is what ``prepare`` gave for each policy."""
    B, T = tokens.shape
    keep = Together.of(policies, model.config, lengths, T)
    memory = tuple(policy.scorer.init(model.config, B, T) for policy in policies)
    hidden, pools = read_layers(model, prepared, tokens, lengths, memory, keep)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    caches = tuple(as_cache(pool, model.config, lengths, reserve) for pool in keep.finish(pools))
    return model.unembed(last), caches


@dataclasses.dataclass(frozen=True)
class Together:
    """A keeper made of several: each takes in every layer, with what is prepared for it and what it remembers."""

    keepers: tuple[Keeper, ...]

    @classmethod
    def of(cls, policies: Sequence[Policy], config: ModelConfig, lengths: Array, T: int) -> "Together":
        """The keepers of the policies, for prompts of the given ``lengths`` [B], padded to T."""
        return cls(tuple(keeper(policy, config, lengths, T) for policy in policies))

    @property
    def plan(self) -> Plan:
        """Of the first; layers are numbered alike in all."""
        return self.keepers[0].plan

    def empty(self, dtype) -> tuple:
        """What each carries into the first layer."""
        return tuple(keep.empty(dtype) for keep in self.keepers)

    def add(self, pools: tuple, layer: Array, is_local: Array, seen: Observation, memory: tuple) -> tuple[tuple, tuple]:
        """The pools with one more layer, and what each policy's scorer remembers."""
        added = [
            keep.add(pool, layer, is_local, dataclasses.replace(seen, prepared=prepared), remembered)
            for keep, pool, prepared, remembered in zip(self.keepers, pools, seen.prepared, memory, strict=True)
        ]
        pools, memory = zip(*added)
        return pools, memory

    def finish(self, pools: tuple) -> tuple:
        """The finished pool of each."""
        return tuple(keep.finish(pool) for keep, pool in zip(self.keepers, pools, strict=True))
