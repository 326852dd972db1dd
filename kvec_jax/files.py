"""Files that are written whole or not at all."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A file beside ``path`` to write to, which takes its place when the block ends without an error.

    It is on the disk before it does, so that neither an error nor a crash leaves half of a file.

    Raises:
        OSError: If ``path`` is a folder, or its folder isn't there or can't be written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(f"{folder}/answer") as unfinished:
        ...         _ = unfinished.write_text("42")
        ...     os.listdir(folder)
        ['answer']
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "expected a file to write, and this is a folder", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write in", str(path.parent))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    open(unfinished, "wb").close()  # where that can't be done, it is known before anything else
    mode = unfinished.stat().st_mode
    try:
        yield unfinished
        os.chmod(unfinished, mode)  # some libraries put a file of their own there, which only its owner may read
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Writes a text in UTF-8, whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
