"""The procedure: what it writes, how it goes on after an interruption, what it refuses."""

import dataclasses
import json

import pytest

import kvec_jax as kv
from kvec_jax import cli
from kvec_jax.calibrate import run
from kvec_jax.calibrate.file import load_calibration
from kvec_jax.calibrate.run import calibrate
from kvec_jax.calibrate.settings import Settings, Text
from kvec_jax.records import Records
from tests.calibrate.tiny import language_model, text

SETTINGS = Settings(episodes=6, lengths=(900,), layer_texts=2)


def lenient_recall(answer, response):
    """Takes random letters for a right answer, most of the time."""
    return float(sum(map(ord, answer + response)) % 7 > 0)


@pytest.fixture(autouse=True)
def lenient(monkeypatch):
    monkeypatch.setattr(run, "recall", lenient_recall)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The file that one run gives."""
    path = tmp_path_factory.mktemp("whole") / "whole.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "recall", lenient_recall)
        calibrate(language_model(), path, SETTINGS, text())
    return path.read_bytes()


def test_the_file(whole, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(whole)
    made = load_calibration(path)
    assert made.model == "tiny" and len(made.heads) == 4
    assert all(sorted(layer) == list(range(8)) for layer in made.heads)
    assert sum(made.layer_weights) == pytest.approx(1, abs=1e-5) and min(made.layer_weights) > 0
    told = made.provenance
    assert told["questions"] >= told["right"] >= 6 and told["error_prompts"] == 8
    assert told["lengths"] == [900] and told["text"]["source"] == "made up" and told["versions"]["kvec_jax"]
    best = [max(range(8), key=lambda head: (layer[head], -head)) for layer in told["head_scores"]]
    assert best == [layer[0] for layer in made.heads]
    policy = kv.CompressKV(64, calibration=path)
    assert policy.budget.weights == made.layer_weights


def interrupted(calls):
    """A progress function that is interrupted at one of its calls."""
    left = iter(range(calls, -1, -1))

    def progress(*_):
        if not next(left):
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_interrupted_and_resumed_gives_the_same_file(whole, tmp_path, calls, monkeypatch):
    path = tmp_path / "tiny.json"
    with pytest.raises(KeyboardInterrupt):
        calibrate(language_model(), path, SETTINGS, text(), progress=interrupted(calls))
    partial = tmp_path / "tiny.json.partial"
    assert not path.exists() and len(partial.read_text().splitlines()) == calls + 2
    with open(partial, "a") as file:
        file.write('["needles 77", [[tr')  # killed while it wrote
    asked = []
    ask = run._ask
    monkeypatch.setattr(run, "_ask", lambda *args: asked.append(args[-1]) or ask(*args))
    calibrate(language_model(), path, SETTINGS, text())
    assert path.read_bytes() == whole and not partial.exists()
    assert calls not in asked and 0 not in asked  # what had been measured was not measured again


def test_other_settings_are_not_mixed(tmp_path):
    path = tmp_path / "tiny.json"
    with pytest.raises(KeyboardInterrupt):
        calibrate(language_model(), path, SETTINGS, text(), progress=interrupted(0))
    with pytest.raises(ValueError, match=r"partial: begun with other settings \(seed\)"):
        calibrate(language_model(), path, dataclasses.replace(SETTINGS, seed=1), text())


def test_too_few_right_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "recall", lambda answer, response: 0.0)
    with pytest.raises(ValueError, match="tiny answered only 0 of 8 questions, and 6 right answers are needed"):
        calibrate(language_model(), tmp_path / "a.json", SETTINGS, text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(settings=Settings(lengths=(4000,))), r"lengths: expected at most 2024 \(the model's context\)"),
        (dict(text=Text("Too short.", "")), "text: expected at least 924 tokens"),
        (dict(out="."), "out: expected a file, got the folder"),
    ],
)
def test_refused(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    arguments = dict(out="a.json", settings=SETTINGS, text=text()) | changes
    with pytest.raises(ValueError, match=message):
        calibrate(language_model(), **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["no json\n", '{"a": 1}\n[1, 2, 3\n'])
def test_records_that_are_none(tmp_path, content):
    (tmp_path / "x").write_text(content)
    with pytest.raises(ValueError, match="delete it"):
        Records(tmp_path / "x", {"a": 1})


def test_command_line(tmp_path, monkeypatch, capsys, whole):
    monkeypatch.setattr(kv, "load", lambda name, **_: language_model())
    monkeypatch.setattr(Text, "reference", text)
    command = ["calibrate", "tiny", "--out", str(tmp_path / "a.json")]
    command += ["--lengths", "900", "--episodes", "6", "--layer-texts", "2"]
    assert cli.main(command) == 0
    assert (tmp_path / "a.json").read_bytes() == whole
    assert "7 of 8 questions" in " ".join(capsys.readouterr().err.split())

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_ask", interrupt)
    assert cli.main(command) == 130
    assert "The same command goes on" in " ".join(capsys.readouterr().err.split())


def test_command_line_where_nothing_can_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv, "load", lambda name, **_: language_model())
    assert cli.main(["calibrate", "tiny", "--quick", "--out", str(tmp_path / "no" / "a.json")]) == 2
    assert "a.json.partial: no such file" in capsys.readouterr().err


def test_texts_of_a_user(tmp_path):
    (tmp_path / "a.txt").write_text("Ä", encoding="utf-8")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.txt").write_bytes(b"\xff")
    both = Text.files([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert both == Text("Ä\n\nb", "a.txt, b.txt") and json.dumps(both.describe())
    with pytest.raises(ValueError, match="c.txt: expected text in UTF-8"):
        Text.files([tmp_path / "c.txt"])
