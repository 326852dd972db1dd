"""What a user meets before any model: the import, the version, the licence, the metadata."""

import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys

import kvec_jax

ROOT = pathlib.Path(__file__).parent.parent


def test_version_is_that_of_the_distribution():
    assert kvec_jax.__version__ == importlib.metadata.version("kvec-jax")


def test_types_are_published():
    assert (pathlib.Path(kvec_jax.__file__).parent / "py.typed").exists()


def test_import_brings_in_nothing_that_is_used_later():
    heavy = ["tokenizers", "gguf", "huggingface_hub", "jinja2", "orbax.checkpoint"]
    code = f"import sys, kvec_jax; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_documented():
    for name, value in vars(kvec_jax).items():
        if not name.startswith("_") and not inspect.ismodule(value):
            assert value.__doc__, name


def test_readme_names_only_commands_and_policies_that_exist():
    from kvec_jax import cli

    text = (ROOT / "README.md").read_text()
    commands = set(re.findall(r"^kvec (\w[\w-]*)", text, re.MULTILINE))
    known = cli._parser()._subparsers._group_actions[0].choices
    assert commands <= set(known)
    for name in re.findall(r"\bkv\.(\w+)", text):
        assert hasattr(kvec_jax, name), name


def test_changelog_has_the_sections_that_releases_are_cut_from():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text or f"## [{kvec_jax.__version__}]" in text
