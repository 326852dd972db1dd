"""From a layer's scores to what is kept of it: who competes with whom, and where the rows go.

A *keeper* goes with the scan over the layers: ``empty`` gives what is carried, ``add`` takes in one layer, ``finish``
gives the pool of a ``CompressedKV``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvec_jax.competition import Competition
from kvec_jax.models.config import ModelConfig
from kvec_jax.policies.base import Observation, Policy, Scores, newest_first
from kvec_jax.policies.budgets import BudgetRule, largest_remainder
from kvec_jax.pool import Pool, equal_pool, ragged_pool
from kvec_jax.select import LOWEST_KEY
from kvec_jax.typing import Array


def keeper(policy: Policy, config: ModelConfig, lengths: Array, T: int) -> "Keeper":
    """The keeper of a policy for prompts of the given ``lengths`` [B], padded to T."""
    plan = Plan(policy, config, lengths, T)
    if plan.keeps_all:
        return Everything(plan)
    if hasattr(policy.budget, "share"):
        return Cascade(plan)
    if policy.scope == "model":
        return WholeModel(plan)
    return PerLayer(plan)


class Plan:
    """What is known before the first layer: sizes, and each layer's budget."""

    def __init__(self, policy: Policy, config: ModelConfig, lengths: Array, T: int):
        self.policy, self.config, self.lengths, self.T = policy, config, lengths, T
        self.B, self.L = lengths.shape[0], config.num_hidden_layers
        self.K, self.D = config.num_key_value_heads, config.head_dim
        self.all_heads = config.all_key_value_heads
        self.num_local = len(config.local_layers)
        self.num_layers = self.L - self.num_local  # that compress
        self.window = min(config.sliding_window or 0, T)
        budget = policy.budget
        self.keeps_all = not self.num_local and _holds_all(budget, T, self.L)
        self.budgets = budget.per_layer(lengths, self.num_layers)  # [layers that compress, B]
        compresses = np.ones(self.L, bool)
        compresses[list(config.local_layers)] = False
        # Number of each layer among those that compress (of no meaning for the others).
        self.ranks = jnp.asarray(np.maximum(np.cumsum(compresses) - 1, 0))

    def rows(self) -> int:
        """Rows that the segments of a prompt may need together."""
        total = self.policy.budget.total(self.T, self.num_layers) + self.window * self.num_local
        return min(self.rivals * total, self.K * self.L * self.T)

    def layer_rows(self, most: int) -> int:
        """Rows that one layer may need, where a head has a budget of ``most`` at most."""
        return min(self.rivals * max(most, self.window), self.K * self.T, self.rows())

    @property
    def rivals(self) -> int:
        """Heads for whose places one device's may compete: its own, or all of a layer, whose places it may win."""
        return self.K if self.policy.scope == "head" else self.all_heads

    def score(self, seen: Observation, memory) -> tuple[Scores, object]:
        """What the policy's scorer says of a layer, and its memory."""
        scores, memory = self.policy.scorer.score(seen, memory)
        return scores if isinstance(scores, Scores) else Scores(scores), memory

    def order(self, seen: Observation, scores: Scores) -> tuple[Array, Array]:
        """Order int32 [B, K, T] of a layer's entries, and each head's budget int32 [B, K]."""
        policy = self.policy
        base = scores.final if scores.base is None else scores.base
        order = policy.order(base, self.lengths)
        budgets = self._divide(seen, order, self.budgets[seen.layer])
        if scores.base is None:
            return order, budgets
        forced = seen.best(order, policy.scorer.forced(budgets))
        return policy.order(scores.final, self.lengths, forced), budgets

    def window_order(self, seen: Observation) -> Array:
        """Order int32 [B, K, T] in which only a local layer's window is better than nothing."""
        order = newest_first(self.lengths, seen.keys.shape[:3])
        age = self.lengths[:, None, None] - 1 - jnp.arange(self.T)
        return jnp.where(age < self.window, order, LOWEST_KEY)

    def _divide(self, seen: Observation, order: Array, budget: Array) -> Array:
        """Divides a layer's budget [B] among its heads: [B, K]."""
        B, K, T = order.shape
        even = jnp.broadcast_to(budget[:, None], (B, K))
        if self.policy.scope != "layer":
            return even
        places = self.all_heads * budget
        best = seen.best_over_heads(order.reshape(B, K * T), places).reshape(B, K, T)
        won = jnp.sum(best, axis=-1, dtype=jnp.int32)
        if not self.policy.floor:
            return won
        floor = jnp.float32(self.policy.floor)
        shares = seen.all_heads((1 - floor) * won + floor * even)
        return seen.own_heads(largest_remainder(shares, places))

    def after(self, seen: Observation, kept: Array, memory):
        """The scorer's memory once it is known which entries of the layer are ``kept``."""
        if jax.tree.leaves(memory):
            kept = seen.all_heads(kept)
        return self.policy.scorer.after(kept, memory)


def _holds_all(budget: BudgetRule, T: int, layers: int) -> bool:
    """Whether every layer's budget holds all of a prompt of T tokens, and so of any shorter one."""
    with jax.ensure_compile_time_eval():
        return bool(jnp.min(budget.per_layer(jnp.array([T], jnp.int32), layers)) >= T)


@dataclasses.dataclass(frozen=True)
class Everything:
    """Keeps all entries: nothing is scored, and whole layers are copied."""

    plan: Plan

    def empty(self, dtype) -> Pool:
        """A pool with room for every entry."""
        plan = self.plan
        return equal_pool(plan.B, plan.L, plan.K, plan.D, plan.T, dtype, plan.lengths)

    def add(self, pool: Pool, layer: Array, is_local: Array, seen: Observation, memory) -> tuple[Pool, object]:
        """The pool with one more layer."""
        return pool.add(layer, seen.keys, seen.values, None), memory

    def finish(self, pool: Pool) -> Pool:
        """The pool as it is."""
        return pool


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Each layer's entries compete among themselves, within a head or over the heads."""

    plan: Plan

    def empty(self, dtype) -> Pool:
        """A pool with segments of one size where all heads keep the same number, and packed segments otherwise."""
        plan = self.plan
        policy, budget = plan.policy, plan.policy.budget
        most = budget.most(plan.T, plan.num_layers)
        if budget.even and policy.scope == "head" and not plan.num_local:
            return equal_pool(plan.B, plan.L, plan.K, plan.D, most, dtype, plan.lengths)
        return ragged_pool(plan.B, plan.L, plan.K, plan.D, plan.rows(), plan.layer_rows(most), dtype)

    def add(self, pool: Pool, layer: Array, is_local: Array, seen: Observation, memory) -> tuple[Pool, object]:
        """The pool with what is kept of one more layer."""
        if self.plan.num_local:
            kept, memory = lax.cond(is_local, self._keep_window, self._keep_best, seen, memory)
        else:
            kept, memory = self._keep_best(seen, memory)
        return pool.add(layer, seen.keys, seen.values, kept, seen.implementations), memory

    def finish(self, pool: Pool) -> Pool:
        """The pool as it is."""
        return pool

    def _keep_best(self, seen: Observation, memory):
        scores, memory = self.plan.score(seen, memory)
        kept = seen.best(*self.plan.order(seen, scores))
        return kept, self.plan.after(seen, kept, memory)

    def _keep_window(self, seen: Observation, memory):
        return self.plan.window_order(seen) != LOWEST_KEY, memory


@dataclasses.dataclass(frozen=True)
class WholeModel:
    """All entries of all layers compete for all places; a local layer's window is given, beside the budget.

    A scorer that remembers what was kept is told what is kept for the time being.
    """

    plan: Plan

    def empty(self, dtype) -> Competition:
        """No entries yet."""
        plan = self.plan
        return Competition.empty(plan.B, plan.rows(), plan.D, plan.T, dtype)

    def add(self, pool: Competition, layer: Array, is_local: Array, seen: Observation, memory):
        """The best entries of the layers so far."""
        plan = self.plan
        if plan.num_local:
            order, memory = lax.cond(is_local, self._window_order, self._score, seen, memory)
        else:
            order, memory = self._score(seen, memory)
        all_order, identity = pool.candidates(layer, order)
        shares = jnp.sum(plan.budgets, axis=0) + jnp.minimum(plan.lengths, plan.window) * plan.num_local
        rank = pool.rank(identity, plan.K, plan.config.part)
        alive = seen.best_over_heads(all_order, plan.all_heads * shares, rank) & (all_order != LOWEST_KEY)
        kept = alive[:, pool.order.shape[1] :].reshape(order.shape)
        pool = pool.replace(alive, all_order, identity, seen.keys, seen.values, seen.implementations)
        return pool, self._after(is_local, seen, kept, memory)

    def finish(self, pool: Competition) -> Pool:
        """The entries sorted into segments, packed end to end."""
        return pool.segments(self.plan.L, self.plan.K)

    def _score(self, seen: Observation, memory):
        scores, memory = self.plan.score(seen, memory)
        return self.plan.order(seen, scores)[0], memory

    def _window_order(self, seen: Observation, memory):
        return self.plan.window_order(seen), memory

    def _after(self, is_local: Array, seen: Observation, kept: Array, memory):
        if not self.plan.num_local:
            return self.plan.after(seen, kept, memory)
        return lax.cond(is_local, lambda memory: memory, lambda memory: self.plan.after(seen, kept, memory), memory)


@dataclasses.dataclass(frozen=True)
class Cascade:
    """Layers share the budget by what they turn out to want: each new layer cuts down those before it.

    Entries are ordered by their place in their own head, so that cutting a layer down to n leaves places 0 to n - 1. A
    layer's budget only falls as layers are added, but for rounding, which may raise it by one again: one entry more is
    held until the end. (Where layers are capped by the prompt's length their surplus may raise an earlier layer again
    by more; those places then stay empty.)
    """

    plan: Plan

    def empty(self, dtype) -> tuple[Competition, Array]:
        """No entries yet, and no layer's preference."""
        plan = self.plan
        places = plan.rows() + plan.K * plan.num_layers
        pool = Competition.empty(plan.B, places, plan.D, plan.T, dtype)
        return pool, jnp.full((plan.num_layers, plan.B), -1.0)

    def add(self, state, layer: Array, is_local: Array, seen: Observation, memory):
        """The entries of one more layer, and what its preference leaves of those before it."""
        pool, preferences = state
        if self.plan.num_local:
            order, preferences, memory = lax.cond(is_local, self._window, self._rank, seen, preferences, memory)
        else:
            order, preferences, memory = self._rank(seen, preferences, memory)
        all_order, identity = pool.candidates(layer, order)
        alive = self._within(all_order, identity, preferences, 1)
        kept = alive[:, pool.order.shape[1] :].reshape(order.shape)
        pool = pool.replace(alive, all_order, identity, seen.keys, seen.values, seen.implementations)
        return (pool, preferences), self.plan.after(seen, kept, memory)

    def finish(self, state) -> Pool:
        """The entries within the last budgets, sorted into segments, packed end to end."""
        pool, preferences = state
        alive = self._within(pool.order, pool.identity, preferences, 0)
        return pool.drop(~alive).segments(self.plan.L, self.plan.K, self.plan.rows())

    def _rank(self, seen: Observation, preferences: Array, memory):
        scores, memory = self.plan.score(seen, memory)
        order = self.plan.policy.order(scores.final, self.plan.lengths)
        place = jnp.argsort(jnp.argsort(order, axis=-1, stable=True, descending=True), axis=-1)
        order = jnp.where(order == LOWEST_KEY, LOWEST_KEY, -place.astype(jnp.int32))
        return order, preferences.at[seen.layer].set(scores.preference), memory

    def _window(self, seen: Observation, preferences: Array, memory):
        order = self.plan.window_order(seen)
        return jnp.where(order == LOWEST_KEY, LOWEST_KEY, 0), preferences, memory

    def _within(self, order: Array, identity: Array, preferences: Array, slack: int) -> Array:
        """Which entries' places in their heads are within their layers' budgets."""
        plan = self.plan
        shared = plan.policy.budget.share(preferences, plan.lengths)[plan.ranks]  # [L, B]
        layer = jnp.minimum(identity // (plan.K * plan.T), plan.L - 1)
        budget = jnp.take_along_axis(shared.T, layer, axis=1) + slack
        return (order != LOWEST_KEY) & (-order < budget)


Keeper = Everything | PerLayer | WholeModel | Cascade
