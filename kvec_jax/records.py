"""Results as they come, one line of JSON each, so that a long procedure can be interrupted and go on."""

import json
import os
import pathlib
from typing import Any

from kvec_jax.files import write_whole


class Records:
    """Results in a file, by name.

    Args:
        path: The file; made if it isn't there, taken up if it is.
        header: What the results depend on, plain values. It stands in the first line.

    Raises:
        ValueError: If the file has results that depend on something else; it says what differs.
        OSError: If the file can't be read or written.
    """

    def __init__(self, path: str | os.PathLike, header: dict[str, Any]):
        self.path = pathlib.Path(path)
        header = json.loads(json.dumps(header))  # tuples become lists, as they will be read
        open(self.path, "a").close()  # what can't be written is found out at once
        lines = _read_lines(self.path)
        if lines and lines[0] != header:
            differs = ", ".join(key for key in header if lines[0].get(key) != header[key]) or "format"
            raise ValueError(f"{self.path}: begun with other settings ({differs}); use the same, or delete it")
        self._results = dict(lines[1:])
        # A line that was cut off when the procedure was killed is dropped before the next is appended.
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in lines or [header]))

    def __iter__(self):
        return iter(self._results)

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def __getitem__(self, name: str) -> Any:
        return self._results[name]

    def add(self, name: str, result: Any) -> None:
        """Keeps a result, plain values, in place of one of that name, and writes it: all of it or nothing."""
        line = json.dumps([name, result])
        with open(self.path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                _write(file, f"{line}\n".encode())
            except BaseException:
                file.truncate(end)
                raise
        self._results[name] = json.loads(line)[1]

    def remove(self) -> None:
        """Deletes the file."""
        self.path.unlink()


def read_records(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and results of a file, which stays as it is.

    Raises:
        ValueError: If the file holds something else.
        OSError: If it can't be read.
    """
    path = pathlib.Path(path)
    header, *results = _read_lines(path) or [None]
    if not isinstance(header, dict):
        raise ValueError(f"{path}: expected results, which begin with what they depend on")
    return header, dict(results)


def _write(file, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def _read_lines(path: pathlib.Path) -> list:
    """Values of all whole lines."""
    text = path.read_text(encoding="utf-8")
    try:
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path}: not results, one line each ({error}); delete it") from None
