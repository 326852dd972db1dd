"""Progress of a long procedure, for people."""

import time


class Bar:
    """A bar for the step under way, or a line now and then where no bar can move."""

    def __init__(self, console):
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[note]}"),
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

    def __call__(self, step: str, done: int, total: int, note: str = "") -> None:
        """Shows how much of a step is done, and what there is to note about it by now."""
        if step not in self._tasks:
            self._tasks[step] = self._bars.add_task(step, total=total, note="")
        self._bars.update(self._tasks[step], completed=done, note=note)
        now = time.monotonic()
        if not self._console.is_terminal and (done == total or now - self._told > 30):
            self._told = now
            self._console.print(f"{step} {done} of {total}, {now - self._began:.0f} s{note and f'; {note}'}")
