"""Reports of results that are known: tables, CSV, pictures."""

import csv
import io

import numpy as np
import pytest

from kvec_jax.evals.bootstrap import mean_of
from kvec_jax.evals.report import comma_separated, markdown, times, write_report
from kvec_jax.evals.run import RESULTS
from kvec_jax.evals.summary import ALL, Results, table
from kvec_jax.records import Records


def result(score, size=1000, where=None):
    return {
        "score": score, "nll": 1 - score, "kl": 0.5, "agreement": 1.0, "coverage": 0.25, "kept": 0.1,
        "cache_bytes": size, "prefill_seconds": 2.0, "decode_seconds": 0.5, "read_together": 3, "new_tokens": 5,
        "where": where, "answer": "x",
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Two tasks: three examples of one, of two lengths, and one of the other."""
    records = Records(tmp_path / RESULTS, {"model": "tiny", "seed": 0})
    scores = {"a/0": (1.0, 0.0, 1.0), "a/1": (1.0, 1.0, 1.0), "b/0": (0.0, 0.0, 1.0)}
    where = [[1] * 64, [2] * 64]
    for number, (name, (full, snapkv, kvec)) in enumerate(scores.items()):
        results = {"full": result(full, 9000), "snapkv@64": result(snapkv), "kvec@64": result(kvec, 1000, where)}
        length = 100 if name.startswith("a") else 200
        facts = {"task": "needle", "protocol": "aware", "length": length, "depth": (number + 0.5) / 3}
        records.add(f"aware/needle/{name}", facts | {"prompt_tokens": 100, "results": results})
    facts = {"task": "own", "protocol": "aware", "length": None, "depth": None, "prompt_tokens": 50}
    own = {"full": result(0.5, 9000), "snapkv@64": result(0.5), "kvec@64": result(0.25)}
    records.add("aware/own/0-abc", facts | {"results": own})
    return tmp_path


def test_rows(folder):
    results = Results.read(folder / RESULTS)
    assert results.protocols == ["aware"] and results.tasks("aware") == ["needle", "own"]
    full, snapkv, kvec = table(results, "aware", "needle")
    assert [row.trial for row in (full, snapkv, kvec)] == ["full", "snapkv@64", "kvec@64"]
    assert full.means["score"].mean == pytest.approx(2 / 3) and full.gains == snapkv.gains == {}
    assert kvec.means["score"] == (1, 1, 1)
    gain = kvec.gains["score"]
    assert gain.mean == pytest.approx(2 / 3) and 0 <= gain.low < gain.high <= 1
    assert kvec.gains["nll"].mean == pytest.approx(-2 / 3) and kvec.gains["kl"] == (0, 0, 0)
    (_, _, kvec) = table(results, "aware", ALL)
    # Each task counts the same: (1 + 1/4) / 2, and gains (2/3 - 1/4) / 2.
    assert kvec.means["score"].mean == pytest.approx(0.625) and kvec.gains["score"].mean == pytest.approx(5 / 24)
    assert [row.examples for row in table(results, "aware", "needle", 100)] == [2, 2, 2]


def test_intervals():
    values = np.random.default_rng(0).normal(size=400).tolist()
    mean = mean_of(values)
    assert mean == mean_of(values)
    assert mean.high - mean.low == pytest.approx(2 * 1.96 * np.std(values) / 20, rel=0.1)
    assert mean_of([3.0]) == (3, 3, 3)
    two = mean_of([0.0, 1.0] * 50, [5.0])
    assert two.mean == 2.75 and two.low < 2.75 < two.high


def test_markdown(folder):
    text = markdown(Results.read(folder / RESULTS))
    assert "# Evaluation of tiny" in text and "## Protocol aware: the question is part of the prompt" in text
    assert "### needle: 3 examples, prompts of 100, 200 tokens" in text and "### own: 1 examples" in text
    assert "| kvec | 64 | 0.250 [0.250, 0.250] | -0.250 [-0.250, -0.250] | 0.750 [0.750, 0.750] |" in text
    assert f"### {ALL}: 4 examples" in text


def test_comma_separated(folder):
    rows = list(csv.DictReader(io.StringIO(comma_separated(Results.read(folder / RESULTS)))))
    wanted = ("needle", "200", "kvec", "score less snapkv's")
    chosen = [row for row in rows if tuple(row[name] for name in ("task", "length", "policy", "measure")) == wanted]
    assert [(row["mean"], row["low"], row["high"], row["examples"]) for row in chosen] == [("1", "1", "1", "1")]
    assert {row["measure"] for row in rows} >= {"score", "nll", "kl", "coverage", "cache_bytes"}


def test_times(folder):
    text = times(Results.read(folder / RESULTS))
    assert "| aware | needle | 100 | kvec | 64 | 2.00 | 3 | 10.0 |" in text


def test_pictures(folder):
    pytest.importorskip("matplotlib", reason="the extra eval is not installed")
    written = write_report(folder)
    names = {path.name for path in written}
    assert names == {
        "report.md", "report.csv", "times.md", "score-aware.png", "kl-aware.png", "nll-aware.png", "bytes-aware.png",
        "depth-aware-needle.png", "kept-aware-needle.png",
    }  # fmt: skip
    before = {path: path.read_bytes() for path in written}
    write_report(folder)
    assert {path: path.read_bytes() for path in written} == before
    assert names | {RESULTS} == {path.name for path in folder.iterdir()}


def test_no_results(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path)
    Records(tmp_path / RESULTS, {"model": "tiny"})
    with pytest.raises(ValueError, match="results.jsonl: no results yet"):
        write_report(tmp_path)
    (tmp_path / RESULTS).write_text("[1, 2]\n")
    with pytest.raises(ValueError, match="results.jsonl: expected results"):
        write_report(tmp_path)
