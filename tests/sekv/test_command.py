"""``kvec spans`` and ``kvec train-zoom``, on a tiny model."""

import json

import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax import cli
from kvec_jax.sekv.policy import SeKV
from kvec_jax.sekv.show import find_spans
from kvec_jax.testing import tiny_language_model

TEXT = " ".join(f"word{i * i % 37}" for i in range(120))


@pytest.fixture
def lm(monkeypatch):
    model = tiny_language_model(num_hidden_layers=2)
    monkeypatch.setattr(kv, "load", lambda name, **arguments: model)
    return model


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(capsys, *argv):
    status = cli.main([str(x) for x in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_spans_of_a_text(lm):
    found = find_spans(lm, TEXT, SeKV(0.2))
    assert "".join(found.pieces) == TEXT
    assert len(found.pieces) == len(TEXT) and found.lengths.sum() + np.sum(found.span_of < 0) == len(TEXT)
    plain = found.marked()
    assert plain.startswith("[word") and plain.endswith("]")
    assert plain.count("[[") == plain.count("]]") > 0
    for mark in ("[", "]", "|"):
        plain = plain.replace(mark, "")
    assert plain == TEXT
    assert found.colored().plain == TEXT
    least, most = found.lengths.min(), found.lengths.max()
    assert f"{len(found.lengths)} spans, {least} to {most} tokens each" in found.summary()


def test_the_papers_rule_keeps_every_surprise(lm):
    found = find_spans(lm, TEXT, SeKV(0.2), cap_anchors=False)
    peaks = found.surprisal > found.threshold
    np.testing.assert_array_equal(found.span_of[peaks], -1)
    assert found.anchors.sum() > find_spans(lm, TEXT, SeKV(0.2)).anchors.sum()


def test_text_that_is_not_whole_characters_a_token(lm):
    found = find_spans(lm, "né à Öslo " * 20)
    assert "".join(found.pieces) == "né à Öslo " * 20


def test_kvec_spans(lm, text, capsys):
    status, out, err = run(capsys, "spans", text, "--tokens", 300, "--share", 0.2)
    assert status == 0
    assert out.count("|") > 3
    assert err.startswith("300 tokens: ")


def test_kvec_spans_draws(lm, text, capsys, tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    assert run(capsys, "spans", text, "--picture", tmp_path / "spans.png")[0] == 0
    assert (tmp_path / "spans.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "options, message",
    [
        (["--share", "0"], "device_share: expected a share in (0, 1], got 0.0"),
        (["--max-span", "3"], "max_span: expected an integer, 16 or more, got 3"),
        (["--tokens", "0"], "--tokens: expected an integer, 1 or more, got 0"),
    ],
)
def test_kvec_spans_says_what_is_wrong(lm, text, capsys, options, message):
    status, _, err = run(capsys, "spans", text, *options)
    assert (status, err.count("\n")) == (2, 1) and message in err


@pytest.mark.slow
def test_kvec_train_zoom(lm, text, capsys, tmp_path):
    out = tmp_path / "zoom"
    argv = ["train-zoom", "--text", text, text, "--out", out, "--steps", 2, "--lengths", 72, "--queries", 8,
            "--validation", 1, "--share", 0.5]  # fmt: skip
    status, _, err = run(capsys, *argv)
    assert status == 0
    assert "KL on held-out text" in err and "after 2 steps" in err
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line[0] for line in lines[1:]] == ["untrained", "validation 0", "step 1", "step 2", "validation 2"]
    policy = SeKV(0.5, head=out / "head.zoom.safetensors")
    assert lm.generate(TEXT, policy=policy, max_new_tokens=3).tokens


def test_kvec_train_zoom_says_what_is_wrong(lm, text, capsys, tmp_path):
    status, _, err = run(capsys, "train-zoom", "--text", text, "--out", tmp_path / "zoom", "--lengths", "4000")
    assert status == 2 and "text: expected 4000 tokens in the last tenth, which is held out" in err
    status, _, err = run(capsys, "train-zoom", "--text", tmp_path / "none.txt", "--out", tmp_path / "zoom")
    assert status == 2 and "none.txt: no such file" in err
    zoom = ("train-zoom", "--text", text, "--out", tmp_path / "zoom")
    status, _, err = run(capsys, *zoom, "--weight", "wish=1")
    assert status == 2 and "--weight: expected one of zoom, wanted, recon, budget, gates, got 'wish'" in err
    status, _, err = run(capsys, *zoom, "--weight", "zoom=-1")
    assert status == 2 and "--weight: expected a number from 0 up for zoom, got -1" in err
    assert not (tmp_path / "zoom").exists()
