"""The division of the device over layers and heads."""

import numpy as np
import pytest

from kvec_jax.errors import LoadError
from kvec_jax.testing import tiny_config
from kvec_jax.tiers.layout import make_layout
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.simulate import replay
from kvec_jax.tiers.windows import Profile, divide, divide_exhaustively, divide_greedily, make_windows


@pytest.mark.parametrize("seed", range(8))
def test_greedy_division_is_as_good_as_any_where_gains_shrink(seed):
    """With one slot per step and shrinking gains, greedy is exact."""
    rng = np.random.default_rng(seed)
    gains = -np.sort(-rng.uniform(size=(4, 4)), axis=1)
    misses = 10 - np.concatenate([np.zeros((4, 1)), np.cumsum(gains, axis=1)], axis=1)
    sizes, room = [3, 4, 5, 6, 7], 12 + seed
    greedy, best = divide_greedily(misses, sizes, room), divide_exhaustively(misses, sizes, room)
    assert greedy.sum() <= room and best.sum() <= room
    saved = [sum(misses[h, sizes.index(s)] for h, s in enumerate(choice)) for choice in (greedy, best)]
    np.testing.assert_allclose(*saved)


@pytest.mark.parametrize("seed", range(8))
def test_greedy_division_is_within_one_step_of_the_best(seed):
    rng = np.random.default_rng(seed)
    misses = -np.sort(-rng.uniform(size=(4, 4)) * 10, axis=1)
    sizes, room = [2, 3, 5, 9], 20
    greedy, best = divide_greedily(misses, sizes, room), divide_exhaustively(misses, sizes, room)
    total = [sum(misses[h, sizes.index(s)] for h, s in enumerate(choice)) for choice in (greedy, best)]
    largest = (misses[:, :1] - misses).max()
    assert total[1] <= total[0] <= total[1] + largest


def test_little_room_gives_everyone_the_least():
    assert divide(np.ones((3, 2)), [4, 8], 12).tolist() == [4, 4, 4]


def windows(policy, **changes):
    config = tiny_config(**changes)
    return make_windows(config, policy, make_layout(config, policy, 2, 256, 8, np.float32), 2, 4)


def test_even_windows_and_their_least():
    policy = Tiered(recent=16)
    assert windows(policy).tolist() == [[3, 3]] * 4  # 29 blocks, of which a step chooses one
    assert windows(policy, sliding_window=8, local_layers=(1,)).tolist() == [[3, 3], [0, 0], [3, 3], [3, 3]]
    assert windows(Tiered(recent=16, device_bytes=2 * 8 * 1024 * 5 + 77)).tolist() == [[5, 5]] * 4
    with pytest.raises(ValueError, match="device_bytes: expected at least 16,384, which a step with budget 0.0625"):
        windows(Tiered(recent=16, device_bytes=16383))


def test_profiles_that_are_none(tmp_path):
    with pytest.raises(LoadError, match="profile: could not read"):
        windows(Tiered(recent=16, profile=tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text('{"format": "x"}')
    with pytest.raises(LoadError, match="not a profile of tiers of this version"):
        windows(Tiered(recent=16, profile=tmp_path / "bad.json"))
    Profile(model="other", factors=(1.0,), misses=[[[1.0]]]).save(tmp_path / "other.json")
    with pytest.raises(LoadError, match=r"expected 4 layers of 2 heads, got \[1, 1\] \(other\)"):
        windows(Tiered(recent=16, profile=tmp_path / "other.json"))


def test_replay_by_hand():
    chosen = [[0, 1], [2, 3], [0, 1], [2, 3]]
    scores = np.array([[9, 9, 0, 0], [5, 1, 9, 9], [9, 9, 2, 1], [0, 0, 9, 9.0]])
    assert replay(chosen, scores, 3, "lru") == [[0, 1], [2, 3], [0], [3]]
    assert replay(chosen, scores, 3, "lookahead") == [[0, 1], [2, 3], [1], [3]]
    assert replay(chosen, scores, 4, "lookahead") == [[0, 1], [2, 3], [], []]
    assert replay(chosen, scores, 2, "belady", start=[2, 3]) == [[0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_nothing_beats_belady(seed):
    rng = np.random.default_rng(seed)
    chosen = [sorted(rng.choice(12, size=3, replace=False).tolist()) for _ in range(30)]
    scores = rng.uniform(size=(30, 12))
    counts = {rule: sum(map(len, replay(chosen, scores, 5, rule))) for rule in ("lookahead", "lru", "belady")}
    assert counts["belady"] <= min(counts.values())
