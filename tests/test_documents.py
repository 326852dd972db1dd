"""What is written for readers runs: the code of README and docs, the notebooks, and the commands' options."""

import importlib.util
import json
import pathlib
import re
import shlex

import pytest

import kvec_jax as kv
from kvec_jax import cli
from kvec_jax.testing import tiny_language_model

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
# What would take long, or write elsewhere; and more tokens where each is a byte.
CHEAPER = {
    "max_new_tokens=4000": "max_new_tokens=40",
    "tail=512": "tail=32",
    "chunk=4096": "chunk=128",
    "lengths=[400]": "lengths=[1500]",
    'disk="/var/tmp"': 'disk="."',
}
TEXT = "\n".join(f"In chapter {n} the contract of {1900 + n} is signed by person {n}." for n in range(10))


# Examples leave it to Python to close files.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder with what examples read, where models are tiny."""
    from kvec_jax.calibrate import file

    (tmp_path / "report.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    lm = tiny_language_model(num_hidden_layers=2, max_position_embeddings=8192)
    monkeypatch.setattr(kv, "load", lambda *_, **__: lm)
    calibration = file.Calibration(model="tiny", heads=((0, 1), (2, 3)), layer_weights=(0.7, 0.3), provenance={})
    monkeypatch.setattr("kvec_jax.policies.compresskv.load_calibration", lambda _: calibration)
    return tmp_path


def run(code, name, names):
    for written, cheaper in CHEAPER.items():
        code = code.replace(written, cheaper)
    exec(compile(code, name, "exec"), names)


@pytest.mark.notebook
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_runs(page, elsewhere, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    for block in blocks:
        if "compile_for" in block and not importlib.util.find_spec("libtpu"):
            continue
        run(block, page.name, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_have_these_options(page):
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^kvec (.*)", "\n".join(blocks).replace("\\\n", " "), re.MULTILINE)
    for line in lines:
        words = shlex.split(line, comments=True)
        if "--help" not in words:
            cli._parser().parse_args(words)


@pytest.mark.notebook
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_runs(notebook, elsewhere, capsys, monkeypatch):
    import matplotlib

    matplotlib.use("agg")
    code = notebook.read_text()
    if "IPython" in code and not importlib.util.find_spec("IPython"):
        code = code.replace("from IPython.display import Image, Markdown, display", "display = Markdown = Image = str")
    run(code, notebook.name, {})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_is_its_script(notebook):
    cells = json.loads(notebook.with_suffix(".ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = notebook.read_text()
    assert all(cell in script for cell in code)
    assert len(code) == len(re.findall(r"^# %%$", script, re.MULTILINE))
    assert not any(cell.get("outputs") for cell in cells)
