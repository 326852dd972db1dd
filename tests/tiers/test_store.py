"""Blocks come back as they were put, from every tier, and what goes wrong is said."""

import errno
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvec_jax.errors import StoreError
from kvec_jax.tiers import disk
from kvec_jax.tiers.store import BlockStore, StoreShape

SHAPE = StoreShape(
    layers=2, rows=2, heads=3, blocks=40, block_tokens=8, head_dim=64, dtype=np.dtype(np.float32), stored_layers=2
)
BACKENDS = ["ram", "mmap", "direct"]
COUNTS = 40 - 7 * np.arange(3) - np.arange(2)[:, None]
# Those there are, last first.
ORDER = np.array([[[*range(count)][::-1] + [*range(count, 40)] for count in row] for row in COUNTS.tolist()])


def filled(tmp_path, backend, **options):
    """A store in which head h of row b has 40 - 7 * h - b blocks, and all of them as an array."""
    store = BlockStore(SHAPE, backend=backend, folder=None if backend == "ram" else str(tmp_path), **options)
    blocks = np.random.default_rng(0).normal(size=(2, 2, 3, 40, *SHAPE.block)).astype(np.float32)
    for layer in range(2):
        store.put(layer, blocks[layer], COUNTS, order=ORDER)
    return store, blocks


def some_ids(seed):
    ids = np.random.default_rng(seed).integers(0, 40, size=(2, 3, 9))
    return np.where(ids < COUNTS[..., None], ids, SHAPE.blocks)


def fetched(store, layer, ids, row=0):
    out = np.full((*ids.shape, *SHAPE.block), np.nan, np.float32)
    store.fetch(layer, ids, out, row)
    return out


def expected(blocks, layer, ids):
    out = np.zeros((*ids.shape, *SHAPE.block), np.float32)
    for at in np.ndindex(ids.shape):
        if ids[at] < SHAPE.blocks:
            out[at] = blocks[layer, at[0], at[1], ids[at]]
    return out


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fetch_gives_what_was_put(tmp_path, backend, threads):
    room = None if backend == "ram" else 17 * SHAPE.block_bytes
    store, blocks = filled(tmp_path, backend, threads=threads, host_bytes=room)
    for seed in range(6):
        ids = some_ids(seed)
        np.testing.assert_array_equal(fetched(store, seed % 2, ids), expected(blocks, seed % 2, ids))
    np.testing.assert_array_equal(fetched(store, 1, ids[1:], row=1), expected(blocks, 1, ids)[1:])
    assert store.memory_bytes() == (2 * 195 * SHAPE.block_bytes if backend == "ram" else room)
    store.close()


def test_blocks_appended_later(tmp_path):
    store, blocks = filled(tmp_path, "direct")
    new = np.random.default_rng(1).normal(size=(2, 3, 2, *SHAPE.block)).astype(np.float32)
    counts = np.array([[0, 2, 1], [1, 2, 2]])
    store.put(0, new, counts, first=COUNTS)
    there = np.arange(2) < counts[..., None]
    got = fetched(store, 0, np.where(there, COUNTS[..., None] + np.arange(2), SHAPE.blocks))
    np.testing.assert_array_equal(got, np.where(there[..., None, None, None], new, 0))
    store.close()


def test_important_blocks_go_into_memory_first(tmp_path):
    store = BlockStore(SHAPE, backend="direct", folder=str(tmp_path), host_bytes=10 * SHAPE.block_bytes)
    blocks = np.zeros((2, 3, 40, *SHAPE.block), np.float32)
    importance = np.random.default_rng(0).uniform(size=(2, 3, 40))
    store.put(0, blocks, np.full((2, 3), 40), importance=importance, room=5)
    best = np.sort(np.argsort(importance.reshape(-1))[-5:])
    assert (store._frame_of >= 0).nonzero()[0].tolist() == best.tolist()
    store.close()


def test_memory_keeps_what_was_fetched_last(tmp_path):
    store, _ = filled(tmp_path, "direct", host_bytes=6 * SHAPE.block_bytes)
    ids = np.array([[[0], [1], [2]], [[3], [4], [5]]])
    fetched(store, 0, ids)
    fetched(store, 0, ids)
    assert (store.counts.disk_blocks, store.counts.memory_blocks) == (6, 6)
    fetched(store, 1, ids)
    fetched(store, 0, ids)
    assert (store.counts.disk_blocks, store.counts.memory_blocks) == (18, 6)
    store.close()


def test_hints_save_reads_and_change_nothing(tmp_path):
    store, blocks = filled(tmp_path, "direct")
    store.hint(0, some_ids(0))
    read = store.counts.disk_bytes_read
    assert store.counts.hinted_blocks > 0 and read > 0
    np.testing.assert_array_equal(fetched(store, 0, some_ids(0)), expected(blocks, 0, some_ids(0)))
    assert store.counts.disk_bytes_read == read and store.counts.disk_blocks == 0
    store.close()


def test_hints_that_fail_are_counted_and_the_fetch_decides(tmp_path, monkeypatch):
    store, blocks = filled(tmp_path, "direct")
    with monkeypatch.context() as broken:
        broken.setattr(disk.os, "preadv", refused)
        store.hint(0, some_ids(0))
        with pytest.raises(StoreError, match="Input/output error; needed for layer 0, row"):
            fetched(store, 0, some_ids(0))
    assert (store.counts.failed_hints, store.counts.hinted_blocks, store.counts.disk_blocks) == (1, 0, 0)
    np.testing.assert_array_equal(fetched(store, 0, some_ids(0)), expected(blocks, 0, some_ids(0)))
    store.close()


def refused(*_):
    raise OSError(errno.EIO, "Input/output error")


def test_extents_are_large_and_counted(tmp_path):
    store, _ = filled(tmp_path, "direct")
    assert store.per_extent * SHAPE.block_bytes >= 64 * 1024
    assert store.disk_bytes() == store.counts.disk_bytes_written == 30 * 64 * 1024
    store.close()


def test_refused_direct_reads_fall_back_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.ExtentFile, "_set_direct", lambda self, on: False)
    store, blocks = filled(tmp_path, "direct")
    assert store.reads == "buffered"
    np.testing.assert_array_equal(fetched(store, 0, some_ids(0)), expected(blocks, 0, some_ids(0)))
    store.close()


def test_direct_reads_refused_only_at_the_first_transfer(tmp_path, monkeypatch):
    calls = []

    def refuse_first(*arguments, _real=os.pwritev):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "refused")
        return _real(*arguments)

    monkeypatch.setattr(disk.os, "pwritev", refuse_first)
    store, blocks = filled(tmp_path, "direct")
    assert store.reads == "buffered" or not hasattr(os, "O_DIRECT")
    np.testing.assert_array_equal(fetched(store, 1, some_ids(3)), expected(blocks, 1, some_ids(3)))
    store.close()


def test_limits(tmp_path):
    with pytest.raises(StoreError, match="host_bytes: the cache takes 1,966,080 bytes and there is no disk, got 1,000"):
        BlockStore(SHAPE, host_bytes=1000)
    with pytest.raises(StoreError, match="disk_bytes: expected at most 100,000 on disk, got 196,608"):
        filled(tmp_path, "direct", disk_bytes=100_000)
    with pytest.raises(StoreError, match="expected a folder to write in"):
        BlockStore(SHAPE, backend="direct", folder=str(tmp_path / "missing"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("backend", ["mmap", "direct"])
def test_short_read_is_named(tmp_path, backend):
    store, _ = filled(tmp_path, backend)
    os.ftruncate(store._disk._fd, 5 * 64 * 1024 + 4096)
    with pytest.raises(StoreError, match=r"extent \d+ is cut short \(expected 65536 bytes.*; needed for layer 0, row"):
        fetched(store, 0, some_ids(0))
    store.close()


def test_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "pwritev", full)
    store = BlockStore(SHAPE, backend="direct", folder=str(tmp_path))
    with pytest.raises(StoreError, match="could not write 65536 bytes: No space left on device"):
        store.put(0, np.zeros((2, 3, 4, *SHAPE.block), np.float32), np.full((2, 3), 4))
    store.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("backend", ["mmap", "direct"])
def test_damaged_extent_is_caught(tmp_path, backend):
    store, _ = filled(tmp_path, backend)
    page = disk.aligned(disk.PAGE)
    os.preadv(store._disk._fd, [page], 3 * 64 * 1024)
    page[77] ^= 1
    os.pwritev(store._disk._fd, [page], 3 * 64 * 1024)
    with pytest.raises(StoreError, match=r"extent 3 is damaged .*; needed for layer 0, row 0, head 1, block 30"):
        fetched(store, 0, np.array([[[SHAPE.blocks], [30], [SHAPE.blocks]]]))
    store.close()


def test_folder_deleted_meanwhile(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    store, blocks = filled(folder, "direct")
    folder.rmdir()  # nothing is in it
    np.testing.assert_array_equal(fetched(store, 0, some_ids(0)), expected(blocks, 0, some_ids(0)))
    store.close()


def test_two_stores_in_one_folder(tmp_path):
    one, blocks = filled(tmp_path, "direct")
    two, _ = filled(tmp_path, "mmap")
    two.put(0, np.zeros_like(blocks[0]), np.full((2, 3), 19))
    np.testing.assert_array_equal(fetched(one, 0, some_ids(0)), expected(blocks, 0, some_ids(0)))
    one.close()
    two.close()
    assert os.listdir(tmp_path) == []


def test_unknown_block_is_named(tmp_path):
    store, _ = filled(tmp_path, "direct")
    with pytest.raises(StoreError, match="no such block was stored: layer 1, row 1, head 2, block 39"):
        fetched(store, 1, np.array([[[7], [8], [39]]]), row=1)
    store.close()


def test_slow_disk_ends_in_an_error(tmp_path, monkeypatch):
    store, _ = filled(tmp_path, "direct", timeout=0.05)
    go_on = threading.Event()
    real = os.preadv
    monkeypatch.setattr(disk.os, "preadv", lambda *arguments: go_on.wait(20) and real(*arguments))
    with pytest.raises(StoreError, match="took more than 0.05 s"):
        fetched(store, 0, some_ids(0))
    go_on.set()
    store.close()


def test_stuck_read_does_not_keep_the_process_from_ending(tmp_path):
    script = f"""
import os, threading
import numpy as np
from kvec_jax.errors import StoreError
from tests.tiers.test_store import fetched, filled, some_ids
store, _ = filled({str(tmp_path)!r}, "direct", timeout=0.2)
os.preadv = lambda *_: threading.Event().wait()
try:
    fetched(store, 0, some_ids(0))
except StoreError as error:
    print(error)
store.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "took more than 0.2 s" in done.stdout and done.returncode == 0, done.stderr


def test_killed_process_leaves_nothing(tmp_path):
    script = f"""
import numpy as np, os, signal
from tests.tiers.test_store import filled
store, _ = filled({str(tmp_path)!r}, "direct")
print(store.disk_bytes(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(30 * 64 * 1024), done.stderr
    assert done.returncode == -9 and os.listdir(tmp_path) == []
    filled(tmp_path, "direct")[0].close()
