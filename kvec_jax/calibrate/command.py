"""``kvec calibrate``: the calibration with a progress bar, and words about what came of it."""

import os
import time

from kvec_jax.calibrate.file import known_name
from kvec_jax.calibrate.run import calibrate
from kvec_jax.calibrate.settings import Settings, Text


def run(model: str, out: str | os.PathLike, settings: Settings, text: Text, *, dtype: str | None = None) -> None:
    """Loads a model, calibrates it and says what was found.

    Args:
        model: What ``kvec_jax.load`` takes.
        out: File to write.
        settings: How much is measured.
        text: Where prompts are cut from.
        dtype: Of weights and cache.
    """
    from rich.console import Console

    import kvec_jax as kv

    console = Console(stderr=True, highlight=False)
    console.print(f"Loading {model}", markup=False)
    lm = kv.load(model, dtype=dtype)
    try:
        with _Bar(console) as bar:
            made = calibrate(lm, out, settings, text, name=known_name(model) or lm.name, progress=bar)
    except KeyboardInterrupt:
        console.print(f"Interrupted. The same command goes on from {os.fspath(out)}.partial.", markup=False)
        raise
    right, asked = made.provenance["right"], made.provenance["questions"]
    console.print(f"{out}: {right} of {asked} questions answered; heads and weights of {len(made.heads)} layers")


class _Bar:
    """A bar for the step under way, or a line now and then where no bar can move."""

    def __init__(self, console):
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        self._console = console
        self._bars = progress.Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks = {}
        self._began = self._told = time.monotonic()

    def __enter__(self):
        self._bars.start()
        return self

    def __exit__(self, *_):
        self._bars.stop()

    def __call__(self, step: str, done: int, total: int) -> None:
        if step not in self._tasks:
            self._tasks[step] = self._bars.add_task(step, total=total)
        self._bars.update(self._tasks[step], completed=done)
        now = time.monotonic()
        if not self._console.is_terminal and (done == total or now - self._told > 30):
            self._told = now
            self._console.print(f"{step} {done} of {total}, {now - self._began:.0f} s")
