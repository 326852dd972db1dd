"""The command line: what it runs and prints, and one line for whatever the user can put right."""

import json
import sys

import pytest

import kvec_jax as kv
from kvec_jax import cli
from kvec_jax.calibrate.settings import Text
from tests.evals.tiny import language_model, story


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(kv, "load", lambda name, **_: language_model())
    monkeypatch.setattr(Text, "reference", story)


def test_run_and_report(tiny, tmp_path, capsys):
    out = str(tmp_path / "out")
    command = f"eval --model tiny --out {out} --tasks needle --policies full,snapkv:kernel=5 --budgets 40".split()
    command += "--lengths 700 --examples 2 --no-pictures".split()
    assert cli.main(command) == 0
    told = capsys.readouterr()
    assert "snapkv:kernel=5" in told.out and "needle, aware 2 of 2" in " ".join(told.err.split())
    before = (tmp_path / "out" / "report.md").read_text()
    assert cli.main(["report", out, "--no-pictures"]) == 0
    assert (tmp_path / "out" / "report.md").read_text() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tasks nedle", "unknown task 'nedle'; did you mean 'needle'? Known: needle, multikey"),
        ("--policies snap", "unknown policy 'snap'; did you mean 'snapkv'? Known: adakv"),
        ("--policies snapkv:depth=3", "policy 'snapkv' has no setting 'depth'; it has: window, kernel, pooling"),
        ("--budgets 8 --policies snapkv", "budget: expected at least 32 tokens (window 32 and sinks 0"),
        ("--protocols blind", "protocol: expected 'aware' or 'agnostic', got 'blind'"),
        ("--examples 0", "--examples: expected an integer, 1 or more, got 0"),
        ("--lengths 10", "--lengths: expected an integer, 128 or more, got 10"),
        ("--tasks needle,needle", "task 'needle' is there more than once"),
        ("--data nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("--data bad.jsonl", "bad.jsonl, line 2: expected 'answers', a list of at least one, got None"),
    ],
)
def test_bad_input(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good = {"context": "x", "question": "y", "answers": ["z"]}
    (tmp_path / "bad.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps({'context': 'x', 'question': 'y'})}\n")
    assert cli.main(["eval", "--out", "out", "--no-pictures", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split()) and error.strip().count("error:") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--lengths x", "--budgets many"])
def test_numbers_that_are_none(option, capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", *option.split()])
    assert "expected" in capsys.readouterr().err


def test_folder_that_cannot_be_written_to(tiny, capsys):
    command = "eval --model tiny --out /proc/out --policies full --lengths 700 --examples 1 --no-pictures".split()
    assert cli.main(command) == 2
    assert "/proc/out" in capsys.readouterr().err


def test_missing_matplotlib_is_named(tmp_path, monkeypatch, capsys):
    from kvec_jax.evals.run import RESULTS
    from kvec_jax.records import Records
    from tests.evals.test_report import result

    records = Records(tmp_path / RESULTS, {"model": "tiny"})
    facts = {"task": "own", "protocol": "aware", "length": None, "depth": None, "prompt_tokens": 50}
    records.add("aware/own/0", facts | {"results": {"full": result(1.0)}})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "pictures need matplotlib: pip install 'kvec-jax[eval]'" in capsys.readouterr().err
    assert (tmp_path / "report.md").exists()  # the tables are there
    assert cli.main(["eval", "--out", str(tmp_path / "new")]) == 2
    assert "pip install 'kvec-jax[eval]'" in capsys.readouterr().err and not (tmp_path / "new").exists()
