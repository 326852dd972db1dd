"""Text over tiers: the same as from the full cache, with what it cost; what goes wrong ends in an error."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import os
import threading

import jax
import jax.numpy as jnp
import pytest

import kvec_jax as kv
from kvec_jax import cli
from kvec_jax.errors import StoreError, UnsupportedError
from kvec_jax.testing import tiny_language_model
from kvec_jax.tiers import disk
from kvec_jax.tiers.store import BlockStore
from kvec_jax.tiers.timeline import picture

PROMPTS = ["the first prompt, which is a little longer than the other " * 4, "a short one"]


def small(**settings):
    return kv.Tiered(**(dict(recent=16, budget=1.0) | settings))


def few_on_device(**settings):
    """The device has room for what a step chooses, and no more."""
    return small(**(dict(budget=0.25, device_bytes=7 * 8 * 1024) | settings))


def test_text_and_what_it_cost(tmp_path):
    lm = tiny_language_model()
    full = lm.generate(PROMPTS, max_new_tokens=6, eos_token_ids=())
    told = []
    policy = small(disk=tmp_path, host_bytes=1 << 16, progress=lambda *what: told.append(what))
    tiered = lm.generate(PROMPTS, policy=policy, max_new_tokens=6, eos_token_ids=())
    for one, other in zip(full, tiered, strict=True):
        assert (one.text, one.tokens) == (other.text, other.tokens)
        assert one.stats.kept == other.stats.kept == one.stats.total
        assert one.stats.full_cache_bytes == other.stats.full_cache_bytes
    stats = tiered[0].stats
    held = stats.tier_bytes
    assert stats.hit_rate == 1.0 and held["disk"] > 0 and held["host"] <= 1 << 16
    assert (stats.host_bytes, stats.moved_bytes) == (held["host"] // 2, 0)
    assert stats.stage_seconds["step"] > 0 and stats.decode_seconds > 0 and stats.reads in ("direct", "buffered")
    assert stats.cache_bytes == (held["device"] + held["resident"]) // 2
    assert told[0] == ("storing layers", 1, 4) and told[-1] == ("writing tokens", 6, 6)
    assert os.listdir(tmp_path) == []


def test_streams_and_samples():
    lm = tiny_language_model()
    pieces = []
    settings = dict(sampler=kv.Sample(), key=jax.random.key(1), max_new_tokens=10, eos_token_ids=())
    output = lm.generate(PROMPTS[0], policy=small(), stream=pieces.append, **settings)
    assert "".join(pieces) == output.text == lm.generate(PROMPTS[0], policy=small(), **settings).text


def test_ends_at_an_end_token():
    lm = tiny_language_model()
    free = lm.generate(PROMPTS[0], policy=small(), max_new_tokens=6, eos_token_ids=())
    ended = lm.generate(PROMPTS[0], policy=small(), max_new_tokens=6, eos_token_ids=free.tokens[2:3])
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[2]) + 1]


def test_a_full_disk_ends_the_run_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "pwritev", full)
    with pytest.raises(StoreError, match="No space left on device"):
        tiny_language_model().generate(PROMPTS[0], policy=small(disk=tmp_path), max_new_tokens=4)
    assert os.listdir(tmp_path) == []


def damaged(fd, buffers, offset, _read=os.preadv):
    count = _read(fd, buffers, offset)
    buffers[0][100] ^= 1
    return count


def cut_short(fd, buffers, offset, _read=os.preadv):
    return _read(fd, buffers, offset) - 512


def refused(*_):
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    "fault, message",
    [(damaged, "damaged"), (cut_short, "cut short"), (refused, "could not read .* Input/output error")],
    ids=["damaged", "cut short", "refused"],
)
def test_what_cannot_be_read_ends_the_run(tmp_path, monkeypatch, fault, message):
    monkeypatch.setattr(disk.os, "preadv", fault)
    policy = few_on_device(disk=tmp_path, host_bytes=0)
    with pytest.raises(StoreError, match=f"{message}.*; needed for layer 0, row 0, head [01], block"):
        tiny_language_model().generate(PROMPTS[0], policy=policy, max_new_tokens=8, eos_token_ids=())


def test_a_stuck_store_ends_the_run(monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(BlockStore, "fetch", lambda *_: go_on.wait(20))
    with pytest.raises(StoreError, match=r"fetching blocks of layer \d took more than 0.2 s"):
        tiny_language_model().generate(
            PROMPTS[0], policy=few_on_device(timeout=0.2), max_new_tokens=8, eos_token_ids=()
        )
    go_on.set()


def test_a_failing_hint_changes_nothing(tmp_path, monkeypatch):
    """It is counted; what a step needs is read by the step."""
    settings = dict(max_new_tokens=8, eos_token_ids=())
    lm, policy = tiny_language_model(), few_on_device(disk=tmp_path, host_bytes=1 << 16, hints=4)
    right = lm.generate(PROMPTS[0], policy=policy, **settings)
    real = BlockStore._read

    def read(self, names):
        if threading.current_thread().name.startswith("kvec-hint"):
            raise StoreError("disk: could not read")
        return real(self, names)

    monkeypatch.setattr(BlockStore, "_read", read)
    output = lm.generate(PROMPTS[0], policy=policy, **settings)
    assert output.tokens == right.tokens
    assert right.stats.failed_hints == 0 < output.stats.failed_hints


def test_two_runs_at_once_share_a_folder_that_is_deleted_meanwhile(tmp_path):
    lm, folder = tiny_language_model(), tmp_path / "scratch"
    folder.mkdir()
    settings = dict(max_new_tokens=8, eos_token_ids=())
    alone = [lm.generate(text, policy=few_on_device(), **settings).tokens for text in (PROMPTS[0], PROMPTS[0][::-1])]
    both = threading.Barrier(2, timeout=300)

    def told(what, done, total):
        if (what, done) == ("storing layers", total):
            both.wait()
            with contextlib.suppress(FileNotFoundError):  # the other may come first
                folder.rmdir()  # nothing is in it
            both.wait()

    policy = few_on_device(disk=folder, host_bytes=0, progress=told)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(lm.generate, text, policy, **settings) for text in (PROMPTS[0], PROMPTS[0][::-1])]
        assert [run.result().tokens for run in runs] == alone
    assert runs[0].result().stats.disk_bytes_per_step > 0 and not folder.exists()


def test_settings_that_make_no_sense(tmp_path):
    lm = tiny_language_model()
    with pytest.raises(ValueError, match="block_tokens: expected an integer, 1 or more, got 0"):
        kv.Tiered(block_tokens=0)
    with pytest.raises(TypeError, match="policy: expected a Policy such as"):
        kv.Tiered(policy="laprox")
    with pytest.raises(ValueError, match="eviction: expected 'lookahead' or 'lru', got 'fifo'"):
        kv.Tiered(eviction="fifo")
    with pytest.raises(ValueError, match="timeout: expected a number above 0, got 0"):
        kv.Tiered(timeout=0)
    with pytest.raises(ValueError, match="flush: expected at least a block of 8 tokens, got 7"):
        kv.Tiered(flush=7)
    with pytest.raises(ValueError, match="device_bytes: expected at least"):
        lm.generate(PROMPTS[0], policy=small(device_bytes=10), max_new_tokens=2)
    with pytest.raises(StoreError, match="host_bytes: the cache takes .* and there is no disk, got 10"):
        lm.generate(PROMPTS[0], policy=small(host_bytes=10), max_new_tokens=2)
    with pytest.raises(StoreError, match="disk: expected a folder to write in"):
        lm.generate(PROMPTS[0], policy=small(disk=tmp_path / "none"), max_new_tokens=2)
    with pytest.raises(TypeError, match="disk: expected a path, got 1"):
        kv.Tiered(disk=1)
    with pytest.raises(ValueError, match="disk_bytes: expected a folder as disk too, got 10 bytes of none"):
        kv.Tiered(disk_bytes=10)
    with pytest.raises(ValueError, match="overlap: expected True or False, got 'no'"):
        kv.Tiered(overlap="no")


def test_only_generate_takes_it():
    lm = tiny_language_model()
    message = "policy: 'tiered' works with LanguageModel.generate only, .*; expected a Policy such as"
    with pytest.raises(UnsupportedError, match=message):
        kv.prefill(lm.model, jnp.ones((1, 8), jnp.int32), jnp.array([8]), small())
    with pytest.raises(UnsupportedError, match=message):
        kv.generate(lm.model, jnp.ones((1, 8), jnp.int32), jnp.array([8]), small(), max_new_tokens=2)
    with pytest.raises(UnsupportedError, match=message):
        lm.compress("a document", small())
    with pytest.raises(UnsupportedError, match="implementation: 'tiered' has plain XLA only, got 'pallas_gpu'"):
        lm.generate("a prompt", small(), implementation="pallas_gpu")
    with pytest.raises(UnsupportedError, match="chunk: tiered can't choose again"):
        lm.generate("a prompt", small(), chunk=64)
    with pytest.raises(UnsupportedError, match="cache_dtype: only for policies that choose rows"):
        lm.generate("a prompt", small(), cache_dtype="int8")


def test_command_line_knows_it_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv, "load", lambda name, **_: tiny_language_model())
    argv = ["generate", PROMPTS[0], "--raw", "--policy", "tiered", "--max-new-tokens", "2"]
    assert cli.main([*argv, "--budget", "0.25", "--set", f"disk={tmp_path}", "--set", "recent=16"]) == 0
    assert "of the full cache's" in capsys.readouterr().err
    assert cli.main([*argv, "--set", "scope=model"]) == 2
    assert capsys.readouterr().err == (
        "kvec generate: error: policy 'tiered' chooses no rows and has no setting 'scope'\n"
    )


def test_benchmark_prints_stages_and_a_timeline(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv, "load", lambda name, **_: tiny_language_model())
    argv = ["bench", "tiers", "--tokens", "256", "--new", "3", "--runs", "1", "--latency", "1"]
    assert cli.main([*argv, "--disk", str(tmp_path), "--budget", "0.05"]) == 0
    printed = capsys.readouterr().out
    assert "overlap, lookahead" in printed and "fetch first, lookahead" in printed and "select |" in printed


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--tokens", "0"], "--tokens: expected an integer, 1 or more, got 0"),
        (["--new", "1"], "--new: expected an integer, 2 or more, got 1"),
        (["--device", "0"], "--device: expected a share in (0, 1], got 0.0"),
        (["--latency", "-1"], "--latency: expected milliseconds, 0 or more, got -1"),
        (["--tokens", "4000"], "tokens: 4000 and 32 new ones are more than the model's 2048"),
        (["--budget", "0.0"], "budget: expected"),
        (["--device", "0.001"], "device_bytes: expected at least"),
        (["--disk", "/nowhere"], "disk: expected a folder to write in, got '/nowhere'"),
    ],
)
def test_benchmark_says_what_is_wrong(monkeypatch, capsys, argv, message):
    monkeypatch.setattr(kv, "load", lambda name, **_: tiny_language_model())
    assert cli.main(["bench", "tiers", "--tokens", "256", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvec bench: error: {message}") and error.count("\n") == 1


def test_calibration_is_used(tmp_path, monkeypatch, capsys):
    lm = tiny_language_model()
    monkeypatch.setattr(kv, "load", lambda name, **_: lm)
    out = tmp_path / "tiers.json"
    assert cli.main(["calibrate", "tiny", "--tiers", "--quick", "--out", str(out)]) == 0
    assert "blocks fetched per step with windows of x1" in capsys.readouterr().err
    policy = small(budget=0.0625, profile=out)
    assert lm.generate(PROMPTS[0], policy=policy, max_new_tokens=4).stats.tier_bytes["device"] > 0
    for argv, message in (
        (["--out", str(tmp_path)], "out: expected a file, got the folder"),
        (["--out", str(tmp_path / "none" / "x.json")], str(tmp_path / "none")),
        (["--out", str(out), "--episodes", "3"], "--episodes doesn't go with --tiers"),
    ):
        assert cli.main(["calibrate", "tiny", "--tiers", "--quick", *argv]) == 2
        assert capsys.readouterr().err.startswith(f"kvec calibrate: error: {message}")


def test_picture_of_nothing():
    assert picture([], 1, [0]) == "0 to 0.0 ms"


def test_policies_are_compared_by_their_settings():
    assert kv.Tiered() == dataclasses.replace(kv.Tiered(hints=3), hints=0)
