"""Calibration files, and those that the package brings along."""

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.calibrate.file import Calibration, load_calibration
from kvec_jax.errors import LoadError
from kvec_jax.models.registry import KNOWN_MODELS
from kvec_jax.shipped import known_name, shipped_folder

ROOT = pathlib.Path(__file__).parent.parent.parent
SHAPES = {"smollm2-135m": (30, 9), "qwen2.5-coder-0.5b": (24, 14)}
EXAMPLE = Calibration(model="m", heads=((1, 0), ()), layer_weights=(0.25, 0.75), provenance={"text": "[\n 1  2\n]"})


def test_written_and_read(tmp_path):
    EXAMPLE.save(tmp_path / "a.json")
    assert load_calibration(tmp_path / "a.json") == EXAMPLE
    assert load_calibration(tmp_path / "a.json").provenance == EXAMPLE.provenance
    assert "[0.25, 0.75]" in (tmp_path / "a.json").read_text()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other"}', '{"format": "kvec_jax calibration 1"}'])
def test_no_calibration_file(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(LoadError, match="a.json: not a calibration file"):
        load_calibration(tmp_path / "a.json")


def test_a_model_without_one():
    with pytest.raises(LoadError, match="'my/own'.*shipped: .*kvec calibrate my/own --out FILE"):
        load_calibration("my/own")


@pytest.mark.parametrize("model", KNOWN_MODELS.values(), ids=lambda model: model.name)
def test_names_of_known_models(model):
    assert known_name(model.name) == known_name(model.hub) == known_name(f"some/where/{model.file}") == model.name
    assert known_name(f"{model.name}-other") is None


@pytest.mark.parametrize("name", SHAPES)
def test_shipped(name):
    made = load_calibration(name)
    layers, heads = SHAPES[name]
    assert made.model == name and len(made.heads) == len(made.layer_weights) == layers
    assert all(len(set(layer)) == heads and set(layer) == set(range(heads)) for layer in made.heads)
    assert np.array(made.provenance["head_scores"]).shape == (layers, heads)
    assert made.provenance["right"] >= 100
    assert sum(made.layer_weights) == pytest.approx(1, abs=1e-4)
    budgets = np.asarray(kv.CompressKV(256, calibration=name).budget.per_layer(np.array([4096]), layers))
    assert budgets.sum() == 256 * layers and budgets.min() >= 32 and budgets.max() <= 3 * 256


def test_shipped_files_are_in_the_wheel(tmp_path):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert settings["wheel"]["force-include"] == {"checkpoints": "kvec_jax/checkpoints"}
    assert "/checkpoints" in settings["sdist"]["include"]
    # A wheel unpacked: the folder is inside the package then.
    shutil.copytree(ROOT / "kvec_jax", tmp_path / "kvec_jax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "checkpoints", tmp_path / "kvec_jax" / "checkpoints")
    code = (
        "from kvec_jax import shipped; from kvec_jax.calibrate import file; "
        "print(shipped.shipped_folder(), file.load_calibration('smollm2-135m').model)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.split() == [str(tmp_path / "kvec_jax" / "checkpoints"), "smollm2-135m"]


def test_shipped_files_are_those_that_the_readme_tells_of():
    text = (ROOT / "checkpoints" / "README.md").read_text()
    assert shipped_folder() == ROOT / "checkpoints"
    for path in shipped_folder().glob("*.calibration.json"):
        assert path.name.removesuffix(".calibration.json") in text
