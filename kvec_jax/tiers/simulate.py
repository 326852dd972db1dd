"""What a device cache of any size and rule would have fetched: a replay of a trace, in numpy.

What a step chooses depends on no cache, so one trace serves them all. The replay is also the oracle of the counts of a
real run.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from kvec_jax.tiers.recorder import Recorder


@dataclasses.dataclass(frozen=True)
class Trace:
    """What the steps of a run chose.

    Attributes:
        chosen: int32 [steps, L, B, K, top], rising, then ``blocks``.
        scores: float32 [steps, L, B, K, N], of all blocks.
        order: int32 [L, B, K, N], blocks from the most important down, as a cache is filled before the first step;
            ``blocks`` for none.
    """

    chosen: np.ndarray
    scores: np.ndarray
    order: np.ndarray

    @classmethod
    def of(cls, recorder: Recorder, layers: int) -> "Trace":
        """The trace that a run left; layers that chose nothing (local ones) are empty.

        Args:
            recorder: Of the run, with a trace.
            layers: L.
        """
        rows = sorted({row for _, row, _, _ in recorder.trace})
        first = recorder.trace[0]
        (_, K, top), N = first[2].shape, first[3].shape[-1]
        B = sum(next(x[2].shape[0] for x in recorder.trace if x[1] == row) for row in rows)
        chosen = np.full((recorder.steps, layers, B, K, top), N, np.int32)
        scores = np.zeros((recorder.steps, layers, B, K, N), np.float32)
        steps = dict.fromkeys(((layer, row) for layer, row, _, _ in recorder.trace), 0)
        for layer, row, picked, values in recorder.trace:
            at = steps[layer, row], layer, slice(row, row + len(picked))
            chosen[at], scores[at] = picked, values
            steps[layer, row] += 1
        order = np.full((layers, B, K, N), N, np.int32)
        for layer, worth in enumerate(recorder.worth):
            best = np.argsort(-worth, axis=-1, kind="stable")
            order[layer, ..., : worth.shape[-1]] = np.where(np.take_along_axis(worth, best, -1) >= 0, best, N)
        return cls(chosen, scores, order)

    @property
    def blocks(self) -> int:
        """N."""
        return self.scores.shape[-1]

    def misses(self, windows: np.ndarray, rule: str) -> np.ndarray:
        """Blocks fetched by each step, int64 [steps, L, B, K], with ``windows`` int [L, K] slots per head."""
        steps, L, B, K, _ = self.chosen.shape
        counts = np.zeros((steps, L, B, K), np.int64)
        for layer, row, head in np.ndindex(L, B, K):
            at = layer, row, head
            chosen = [step[step < self.blocks].tolist() for step in self.chosen[:, *at]]
            start = [block for block in self.order[at].tolist() if block < self.blocks]
            fetched = replay(chosen, self.scores[:, *at], int(windows[layer, head]), rule, start)
            counts[:, *at] = [len(step) for step in fetched]
        return counts


def replay(
    chosen: Sequence[Sequence[int]], scores: np.ndarray, size: int, rule: str, start: Sequence[int] = ()
) -> list[list[int]]:
    """The blocks that each step of one head fetches.

    Args:
        chosen: For each step, the blocks that it needs, rising.
        scores: float [steps, N], what a block is worth to a step.
        size: Slots; at least as many as a step needs.
        rule: ``"lookahead"``: the least worthy in the current step leaves; ``"lru"``: the one not needed for longest;
            ``"belady"``: the one not needed again for longest, which no real cache can know and none can beat.
        start: Blocks in the cache before the first step, as many as fit.

    Returns:
        One list per step.

    Example:
        >>> replay([[0, 1], [1, 2], [0, 2]], np.zeros((3, 3)), 2, "lru")
        [[0, 1], [2], [0]]
    """
    slots: list[int | None] = [*start[:size]] + [None] * (size - len(start[:size]))
    used = dict.fromkeys(slots, 0)
    fetched = []
    for step, needed in enumerate(chosen):
        missing = [block for block in needed if block not in slots]
        worth = functools.partial(_worth, rule, chosen, scores, used, step)
        free = [slot for slot, block in enumerate(slots) if block not in needed]
        free.sort(key=lambda slot: -np.inf if slots[slot] is None else worth(slots[slot]))
        for block, slot in zip(missing, free):
            slots[slot] = block
        used |= dict.fromkeys(needed, step + 1)
        fetched.append(missing)
    return fetched


def _worth(rule: str, chosen, scores: np.ndarray, used: dict, step: int, block: int) -> float:
    """How much a rule wants to keep a block that this step doesn't need."""
    if rule == "lookahead":
        return scores[step][block]
    return used[block] if rule == "lru" else -_next_use(chosen, block, step)


def _next_use(chosen: Sequence[Sequence[int]], block: int, step: int) -> float:
    later = (other for other in range(step + 1, len(chosen)) if block in chosen[other])
    return next(later, np.inf)
