"""Blocks on disk: a file without a name, cut into extents that are read whole and checked.

The name of the file is removed as soon as it is open. The operating system then gives its space back when the process
ends, however it ends; sessions never meet; and a folder that is deleted meanwhile takes nothing away from a run.
"""

import concurrent.futures
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from kvec_jax.errors import StoreError
from kvec_jax.tiers.threads import Threads

PAGE = 4096
# Smaller reads are slow whatever the method, so blocks are read by the extent.
LEAST_EXTENT = 64 * 1024


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed uint8 memory that begins at a page, as O_DIRECT asks."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class ExtentFile:
    """Extents of one size in a scratch file.

    Args:
        folder: Where the file lies.
        extent_bytes: A multiple of ``PAGE``.
        backend: ``"direct"`` reads and writes past the page cache, where the file system lets it; ``"mmap"`` reads
            through a memory map.
        threads: That read at the same time.
        limit: Most bytes; ``None`` means as many as there is room for.
        timeout: Seconds that a batch of reads may take.

    Raises:
        StoreError: If there is no such folder, or no file can be made in it.
    """

    def __init__(
        self, folder: str, extent_bytes: int, backend: str, threads: int, limit: int | None, timeout: float
    ) -> None:
        self.backend, self._limit, self._timeout = backend, limit, timeout
        self.extent_bytes = extent_bytes
        self._sums: list[int] = []
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._map: mmap.mmap | None = None
        self._stuck = False
        try:
            self._fd, path = tempfile.mkstemp(prefix=".kvec-", dir=folder)
        except OSError as error:
            raise StoreError(f"disk: expected a folder to write in, got {folder!r} ({error.strerror})") from error
        os.unlink(path)
        self.direct = backend == "direct" and self._set_direct(True)
        self._threads = threads
        self._pool = Threads(threads, "kvec-read")

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return len(self._sums) * self.extent_bytes

    def append(self, extents: np.ndarray) -> int:
        """Writes uint8 [n, extent_bytes], which begins at a page; returns the number of the first extent.

        Raises:
            StoreError: If the limit or the disk is reached. What was written before stays readable.
        """
        sums = [zlib.crc32(extent) for extent in extents]
        with self._lock:
            if self._fd < 0:
                raise StoreError("disk: the store is closed")
            first = len(self._sums)
            total = self.nbytes + extents.nbytes
            if self._limit is not None and total > self._limit:
                raise StoreError(f"disk_bytes: expected at most {self._limit:,} on disk, got {total:,}")
            self._write(extents.reshape(-1), self.nbytes)
            self._sums += sums
        return first

    def visit(self, numbers: Sequence[int], use: Callable[[int, np.ndarray], None]) -> None:
        """Reads extents and calls ``use(i, extent)`` for the i-th of ``numbers``, from the reading threads.

        An extent, uint8 [extent_bytes], is valid during the call only.

        Raises:
            StoreError: If a read fails, is short, is damaged or takes too long; it names the extent.
        """
        tasks = [
            self._pool.submit(self._visit_some, numbers, range(start, len(numbers), self._threads), use)
            for start in range(min(self._threads, len(numbers)))
        ]
        done, waiting = concurrent.futures.wait(tasks, self._timeout)
        self._stuck |= any(not task.cancel() for task in waiting)
        for task in done:
            task.result()
        if waiting:
            raise StoreError(f"disk: reading {len(numbers)} extents took more than {self._timeout} s")

    def close(self) -> None:
        """Gives the file's space back; if a read or write never returned, only the end of the process does."""
        ended = self._pool.close(0 if self._stuck else self._timeout)
        self._map = None
        if not ended or not self._lock.acquire(timeout=self._timeout):
            return
        try:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
        finally:
            self._lock.release()

    def _visit_some(self, numbers, indices, use) -> None:
        for i in indices:
            number = int(numbers[i])
            extent = self._mapped(number) if self.backend == "mmap" else self._read(number)
            if zlib.crc32(extent) != self._sums[number]:
                raise StoreError(f"disk: extent {number} is damaged (its checksum is another than when it was written)")
            use(i, extent)

    def _read(self, number: int) -> np.ndarray:
        if not hasattr(self._scratch, "extent"):
            self._scratch.extent = aligned(self.extent_bytes)
        extent = self._scratch.extent
        got = self._transfer(os.preadv, extent, number * self.extent_bytes)
        self._check_length(number, got)
        return extent

    def _mapped(self, number: int) -> np.ndarray:
        start, end = number * self.extent_bytes, (number + 1) * self.extent_bytes
        size = os.fstat(self._fd).st_size  # a page beyond the file's end would kill the process
        self._check_length(number, min(max(size - start, 0), self.extent_bytes))
        with self._lock:
            if self._map is None or len(self._map) < end:
                self._map = mmap.mmap(self._fd, size, prot=mmap.PROT_READ)  # an earlier map lives as long as it is used
            mapped = self._map
        return np.frombuffer(mapped, np.uint8, self.extent_bytes, start)

    def _check_length(self, number: int, got: int) -> None:
        if got != self.extent_bytes:
            raise StoreError(f"disk: extent {number} is cut short (expected {self.extent_bytes} bytes, got {got})")

    def _write(self, data: np.ndarray, offset: int) -> None:
        done = 0
        while done < data.nbytes:
            count = self._transfer(os.pwritev, data[done:], offset + done)
            if count <= 0:
                raise StoreError(f"disk: {data.nbytes - done} bytes could not be written")
            done += count

    def _transfer(self, call, data: np.ndarray, offset: int) -> int:
        try:
            return call(self._fd, [data], offset)
        except OSError as error:
            # Some file systems refuse O_DIRECT only now.
            if error.errno == errno.EINVAL and self.direct and self._set_direct(False):
                self.direct = False
                return self._transfer(call, data, offset)
            verb = "write" if call is os.pwritev else "read"
            raise StoreError(error.errno, f"disk: could not {verb} {data.nbytes} bytes: {error.strerror}") from error

    def _set_direct(self, on: bool) -> bool:
        """Switches O_DIRECT; whether the system has it and the file system did not refuse."""
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
        except OSError:
            return False
        return bool(flag)
