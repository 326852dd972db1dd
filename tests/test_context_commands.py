"""``kvec compress`` and ``kvec ask``: from a text to a file, and from there to answers."""

import pytest

import kvec_jax as kv
from kvec_jax import cli
from kvec_jax.testing import tiny_language_model


@pytest.fixture
def loads(monkeypatch):
    """What was loaded, with which options."""
    seen = []

    def load(name, **options):
        seen.append((name, options))
        return tiny_language_model(chat=False)

    monkeypatch.setattr(kv, "load", load)
    return seen


@pytest.fixture
def book(loads, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 4)
    path = str(tmp_path / "book.kv")
    assert run("compress", str(tmp_path / "book.txt"), "--out", path, "--policy", "streaming", "--budget", "32") == 0
    err = capsys.readouterr().err
    assert "129 tokens read" in err and path in err and err.count("\n") == 1
    return path


def run(*argv):
    try:
        return cli.main(argv)
    except SystemExit as stop:
        return stop.code


def test_questions_are_answered_from_the_file(book, loads, capsys):
    assert run("ask", book, "Who?", "Why?", "--max-new-tokens", "4") == 0
    printed = capsys.readouterr()
    lm = tiny_language_model(chat=False)
    answers = lm.ask(kv.load_context(book, lm), ["Who?", "Why?"], max_new_tokens=4)
    assert printed.out == f"> Who?\n{answers[0].text}\n\n> Why?\n{answers[1].text}\n"
    assert printed.err.count("\n") == 2 and "tokens after 129 of the context read in" in printed.err
    assert loads[-1] == ("tiny", {"dtype": "float32"})


def test_an_answer_streams(book, loads, capsys):
    assert run("ask", book, "Who?", "--max-new-tokens", "4", "--model", "mine", "--stream") == 0
    streamed = capsys.readouterr().out
    assert loads[-1][0] == "mine"
    run("ask", book, "Who?", "--max-new-tokens", "4")
    assert streamed == capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compress", "book.txt", "--policy", "snapkv"], "required: --out"),
        (["compress", "book.txt", "--out", "a.kv"], "required: --policy"),
        (["compress", "no/such/file", "--out", "a.kv", "--policy", "snapkv"], "no/such/file: no such file"),
        (["compress", __file__, "--out", "a.kv", "--policy", "snapvk"], "did you mean 'snapkv'?"),
        (["compress", __file__, "--out", "no/such/a.kv", "--policy", "snapkv"], "no such folder: no/such"),
        (["compress", __file__, "--out", "a.kv", "--policy", "sekv"], "--policy: only contexts of rows"),
        (["compress", __file__, "--out", "/", "--policy", "snapkv"], "expected a file to write, and / is a folder"),
        (["ask", "a.kv"], "required: QUESTION"),
        (["ask", "no/such.kv", "Who?"], "no/such.kv: can't be read"),
        (["ask", __file__, "Who?"], "no context"),
        (["ask", "a.kv", "Who?", " "], "QUESTION: expected a text"),
        (["ask", "a.kv", "Who?", "--max-new-tokens", "0"], "--max-new-tokens: expected"),
        (["ask", "a.kv", "Who?", "Why?", "--stream"], "--stream: expected one question, got 2"),
    ],
)
def test_user_errors_are_one_line_and_status_2(loads, capsys, argv, message):
    assert run(*argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and printed.err.count("\n") == 1
