"""How the blocks on the device are divided over layers and heads: evenly, or by a profile and a knapsack.

Each (layer, head) takes one of a few sizes. A larger one saves fetches, as a replay of a trace says, and costs slots:
the multiple-choice knapsack.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib

import numpy as np

from kvec_jax.errors import LoadError
from kvec_jax.files import write_whole
from kvec_jax.models.config import ModelConfig
from kvec_jax.tiers.layout import WINDOW, Layout
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.simulate import Trace

_FORMAT = "kvec_jax tiers profile 1"
# Sizes that a (layer, head) can have, in what a step chooses.
FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
# Combinations up to which all are tried.
_FEW = 20_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """What device caches of different sizes would have fetched.

    Attributes:
        model: Its name.
        factors: Sizes, in what a step chooses.
        misses: For each layer, head and size, blocks fetched per step; zeros for local layers.
        provenance: Plain values: settings of the trace.
    """

    model: str
    factors: tuple[float, ...]
    misses: list[list[list[float]]]
    provenance: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def measure(cls, model: str, trace: Trace, top: int, rule: str, provenance: dict) -> "Profile":
        """Replays a trace with every size."""
        L, K = trace.chosen.shape[1], trace.chosen.shape[3]
        columns = [
            trace.misses(np.full((L, K), slots(factor, top, trace.blocks)), rule).mean(axis=(0, 2))
            for factor in FACTORS
        ]
        misses = np.round(np.stack(columns, axis=-1), 4).tolist()
        return cls(model=model, factors=FACTORS, misses=misses, provenance=provenance)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file, whole or not at all."""
        write_whole(path, json.dumps({"format": _FORMAT} | dataclasses.asdict(self)) + "\n")


def load_profile(path: str | os.PathLike) -> Profile:
    """Reads a file of ``Profile.save``.

    Raises:
        LoadError: If there is none, or it is not one.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        profile = Profile(**content)
        if np.asarray(profile.misses, float).shape[2:] != (len(profile.factors),):
            raise ValueError(f"expected {len(profile.factors)} numbers for each layer and head")
        return profile
    except OSError as error:
        raise LoadError(f"profile: could not read {os.fspath(path)!r} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{os.fspath(path)}: not a profile of tiers of this version ({error})") from error


def make_windows(config: ModelConfig, policy: Tiered, layout: Layout, rows: int, itemsize: int) -> np.ndarray:
    """Slots on the device for each layer and head of each row, int [L, K]; 0 for local layers.

    Args:
        config: Of the model.
        policy: With ``device_bytes`` and ``profile``.
        layout: Of the run.
        rows: B, of the whole batch.
        itemsize: Bytes of a number.

    Raises:
        ValueError, LoadError: If ``device_bytes`` can't hold what a step chooses, or the profile is of another model.
    """
    windows = np.zeros((layout.layers, layout.heads), np.int64)
    own = np.setdiff1d(np.arange(layout.layers), config.local_layers)
    heads = len(own) * layout.heads
    if not heads:
        return windows
    room = WINDOW * layout.top * heads
    if policy.device_bytes is not None:
        room = _device_blocks(policy, layout, rows, heads, itemsize)
    if policy.profile is None:
        windows[own] = min(room // heads, layout.blocks)
        return windows
    profile = load_profile(policy.profile)
    misses = np.asarray(profile.misses, float)
    if misses.shape[:2] != windows.shape:
        raise LoadError(
            f"{policy.profile}: expected {layout.layers} layers of {layout.heads} heads, got {list(misses.shape[:2])} "
            f"({profile.model})"
        )
    sizes = [slots(factor, layout.top, layout.blocks) for factor in profile.factors]
    windows[own] = divide(misses[own].reshape(heads, -1), sizes, room).reshape(len(own), -1)
    return windows


def slots(factor: float, top: int, blocks: int) -> int:
    """Slots of a head for ``factor`` times the ``top`` blocks that a step chooses, at most ``blocks``."""
    return min(math.ceil(factor * top), blocks)


def divide(misses: np.ndarray, sizes: list[int], room: int) -> np.ndarray:
    """The size for each of some heads that together save most fetches.

    Args:
        misses: float [heads, len(sizes)], blocks fetched per step with each size.
        sizes: Rising; the first is the least that a head must have.
        room: Slots for all heads.

    Returns:
        int [heads]. The best division where few are possible; else the greedy one, which makes the step that saves
        most per slot for as long as one fits.

    Example:
        >>> divide(np.array([[4.0, 3.0, 0.0], [4.0, 3.5, 3.0]]), [2, 4, 6], 8).tolist()
        [6, 2]
    """
    if len(sizes) ** len(misses) <= _FEW:
        return divide_exhaustively(misses, sizes, room)
    return divide_greedily(misses, sizes, room)


def divide_greedily(misses: np.ndarray, sizes: list[int], room: int) -> np.ndarray:
    """See ``divide``."""
    sizes = np.asarray(sizes)
    heads = np.arange(len(misses))
    at = np.zeros(len(misses), int)
    left = room - len(misses) * sizes[0]
    while True:
        cost = sizes - sizes[at][:, None]
        saved = misses[heads, at][:, None] - misses
        fits = (cost > 0) & (cost <= left) & (saved > 0)
        if not fits.any():
            return sizes[at]
        gain = np.where(fits, saved / np.where(fits, cost, 1), -np.inf)
        head, to = np.unravel_index(np.argmax(gain), gain.shape)
        left -= cost[head, to]
        at[head] = to


def divide_exhaustively(misses: np.ndarray, sizes: list[int], room: int) -> np.ndarray:
    """See ``divide``; of equally good ones, the smallest sizes for the first heads."""
    sizes = np.asarray(sizes)
    heads = np.arange(len(misses))
    options = (np.array(choice) for choice in itertools.product(range(len(sizes)), repeat=len(misses)))
    possible = [choice for choice in options if sizes[choice].sum() <= room]
    return sizes[min(possible, key=lambda choice: misses[heads, choice].sum())]


def _device_blocks(policy: Tiered, layout: Layout, rows: int, heads: int, itemsize: int) -> int:
    """Blocks of each row that ``device_bytes`` hold."""
    block_bytes = math.prod(layout.block_shape) * itemsize
    room, least = policy.device_bytes // (rows * block_bytes), heads * layout.top
    if room < least:
        raise ValueError(
            f"device_bytes: expected at least {least * rows * block_bytes:,}, which a step with budget "
            f"{policy.budget} chooses, got {policy.device_bytes:,}"
        )
    return room
