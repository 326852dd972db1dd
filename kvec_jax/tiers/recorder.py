"""Where the time of a run goes: sums by stage and, if asked for, every event."""

import dataclasses
import queue
import threading
import time
from typing import NamedTuple

import jax
import numpy as np


class Event(NamedTuple):
    """One stage of one layer of one micro-batch; times in seconds of ``time.perf_counter``.

    Attributes:
        stage: ``"select"``, ``"hit"``, ``"miss"`` and ``"finish"`` on the device, ``"fetch"`` on the host, ``"stall"``:
            the host waits for a fetch.
        step: Of the generation.
        layer: Of the model.
        part: Micro-batch.
        dispatched: When the host asked for it.
        ended: When it was done.
    """

    stage: str
    step: int
    layer: int
    part: int
    dispatched: float
    ended: float


@dataclasses.dataclass
class Recorder:
    """Adds up what a run does.

    Attributes:
        seconds: By stage, of host stages; with ``events``, of device stages too.
        chosen: Blocks that steps attended to.
        missed: Of these, fetched.
        fetches: Stages with anything to fetch.
        steps: Steps of the whole batch.
        events: All events, if they are wanted.
        trace: What steps chose, if it is wanted: layer, first row, chosen blocks [b, K, top] and scores [b, K, N], in
            the order they come.
        worth: With a trace, what each layer's blocks were worth when the prompt was read, [B, K, n].
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    chosen: int = 0
    missed: int = 0
    fetches: int = 0
    steps: int = 0
    events: list[Event] | None = None
    trace: list[tuple[int, int, np.ndarray, np.ndarray]] | None = None
    worth: list[np.ndarray] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self._lock = threading.Lock()
        self._waiting: queue.Queue = queue.Queue()
        self._watcher: threading.Thread | None = None

    def add(self, stage: str, layer: int, part: int, dispatched: float, step: int | None = None) -> None:
        """A stage that ends now."""
        ended = time.perf_counter()
        with self._lock:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + ended - dispatched
            if self.events is not None:
                self.events.append(Event(stage, self.steps if step is None else step, layer, part, dispatched, ended))

    def watch(self, stage: str, layer: int, part: int, dispatched: float, result: jax.Array) -> None:
        """A stage of the device that ends when ``result``, which is never donated, is there."""
        if self.events is None:
            return
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="kvec-watch", daemon=True)
            self._watcher.start()
        self._waiting.put((stage, self.steps, layer, part, dispatched, result))

    def settle(self) -> None:
        """Waits until all watched stages have ended, or one has failed."""
        while self._waiting.unfinished_tasks and self._watcher.is_alive():
            time.sleep(0.001)

    def forget(self) -> None:
        """Forgets what was recorded so far."""
        self.settle()
        self.seconds.clear()
        self.chosen = self.missed = self.fetches = self.steps = 0
        for records in (self.events, self.trace, self.worth):
            if records is not None:
                records.clear()

    def _watch(self) -> None:
        while True:
            stage, step, layer, part, dispatched, result = self._waiting.get()
            result.block_until_ready()
            self.add(stage, layer, part, dispatched, step)
            self._waiting.task_done()


_compilations: list[float] = []


def _listen(event: str, duration: float, **_) -> None:
    if event.endswith("backend_compile_duration"):
        _compilations.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiled_seconds() -> float:
    """Seconds that XLA has spent compiling in this process."""
    return sum(_compilations)
