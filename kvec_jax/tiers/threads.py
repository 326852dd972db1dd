"""Threads that don't keep a process from ending, whatever they are stuck in."""

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable

from kvec_jax.errors import StoreError


class Threads:
    """As ``concurrent.futures.ThreadPoolExecutor``, for whose threads the interpreter waits at its end.

    Args:
        count: Tasks that run at the same time.
        name: Of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable, *arguments) -> concurrent.futures.Future:
        """Calls ``function`` when a thread is free.

        Raises:
            StoreError: If the threads were closed.
        """
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            self._tasks.put((future, function, arguments))
        return future

    def close(self, seconds: float = 0.0) -> bool:
        """Cancels what has not begun, and waits for the rest so long at most; whether all threads have ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _cancel(self._tasks)
                for _ in self._threads:
                    self._tasks.put(None)
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)


def wait_for(future: concurrent.futures.Future, seconds: float, what: str):
    """The result of ``future``.

    Raises:
        StoreError: If it takes longer; ``what`` says what was going on.
    """
    if not concurrent.futures.wait([future], seconds).done:
        raise StoreError(f"{what} took more than {seconds} s")
    return future.result()


def _work(tasks: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        _run(*task)
        del task  # its arrays would live on until the next one comes


def _run(future: concurrent.futures.Future, function: Callable, arguments: tuple) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*arguments)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _cancel(tasks: queue.SimpleQueue) -> None:
    try:
        while True:
            future, _, _ = tasks.get_nowait()
            future.cancel()
    except queue.Empty:
        pass
