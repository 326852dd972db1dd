"""The division of the device over layers and heads."""

import numpy as np
import pytest

from kvec_jax.errors import LoadError
from kvec_jax.testing import tiny_config
from kvec_jax.tiers.layout import make_layout
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.recorder import Recorder
from kvec_jax.tiers.simulate import Trace, replay
from kvec_jax.tiers.windows import Profile, divide, divide_exhaustively, divide_greedily, make_windows
from tests.tiers.runs import run, tiered


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
    return make_windows(config, policy, make_layout(config, policy, 2, 256, 8), 2, 4)


def test_even_windows_and_their_least():
    policy = Tiered(recent=16)
    assert windows(policy).tolist() == [[3, 3]] * 4  # 29 blocks, of which a step chooses one
    assert windows(policy, sliding_window=8, local_layers=(1,)).tolist() == [[3, 3], [0, 0], [3, 3], [3, 3]]
    assert windows(Tiered(recent=16, device_bytes=2 * 8 * 1024 * 5 + 77)).tolist() == [[5, 5]] * 4
    with pytest.raises(ValueError, match="device_bytes: expected at least 16,384, which a step with budget 0.0625"):
        windows(Tiered(recent=16, device_bytes=16383))


def test_profile_gives_more_to_those_who_gain(tmp_path):
    recorder = Recorder(trace=[])
    _, decoder = run(tiered(), 8, recorder=recorder)
    trace = Trace.of(recorder, 4)
    made = Profile.measure("tiny", trace, decoder.layout.top, "lookahead", dict(steps=8))
    path = tmp_path / "profile.json"
    made.save(path)
    policy = tiered(profile=path, device_bytes=4 * 2 * 4 * 1024 * 14)
    logits, other = run(policy, 8)
    assert other.windows.sum() <= 2 * 4 * 14 and other.windows.min() >= other.layout.top
    assert trace.misses(other.windows, "lookahead").sum() == other.recorder.missed
    even, _ = run(tiered(device_bytes=policy.device_bytes), 8)
    np.testing.assert_allclose(logits, even, atol=2e-4)
    assert other.recorder.missed <= trace.misses(np.full((4, 2), 7), "lookahead").sum()


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
