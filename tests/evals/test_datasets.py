"""Examples from JSON lines: each form, and what is said of lines that are none."""

import gzip
import json
import sys
import types

import pytest

from kvec_jax.evals.datasets import hub_tasks, read_tasks

PLAIN = {"context": "Owls hoot.", "question": "What do owls do?", "answers": ["hoot"]}
LONGBENCH = {
    "input": "Who?", "context": "Passage 1:\nAn owl.", "answers": ["owl"], "length": 7, "dataset": "hotpotqa",
    "language": "en", "all_classes": None, "_id": "x",
}  # fmt: skip
RULER = {"index": 0, "input": "Memorize this.\nThe number is 7.\nWhat is the number? It is", "outputs": ["7"]}


def write(path, rows, compress=False):
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    if compress:
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def test_plain_form(tmp_path):
    rows = [PLAIN, PLAIN | {"answers": "hoot", "metric": "found", "max_new_tokens": 3, "answer_prefix": "They"}]
    (task,) = read_tasks(write(tmp_path / "owls.jsonl", rows))
    first, second = task.examples
    assert task.name == "owls" and first.name != second.name
    assert (first.context, first.question, first.answers, first.metric) == (
        "Owls hoot.",
        PLAIN["question"],
        ("hoot",),
        "qa_f1",
    )
    assert (second.answers, second.metric, second.max_new_tokens, second.answer_prefix) == (
        ("hoot",),
        "found",
        3,
        "They",
    )


def test_names_follow_content(tmp_path):
    one, same = (read_tasks(write(tmp_path / f"{name}.jsonl", [PLAIN]))[0].examples[0].name for name in "ab")
    other = read_tasks(write(tmp_path / "c.jsonl", [PLAIN | {"question": "What?"}]))[0].examples[0].name
    assert one == same != other


def test_longbench_form(tmp_path):
    trec = LONGBENCH | {
        "dataset": "trec",
        "input": "Question: Who?\nType:",
        "all_classes": ["Person"],
        "answers": ["Person"],
    }
    path = write(tmp_path / "lb.jsonl.gz", [LONGBENCH, trec, LONGBENCH], compress=True)
    hotpot, trec = read_tasks(path)
    assert (hotpot.name, len(hotpot.examples), trec.name) == ("hotpotqa", 2, "trec")
    (example,) = trec.examples
    assert (
        example.metric == "classification"
        and example.classes == ("Person",)
        and example.first_line
        and not example.chat
    )
    question = hotpot.examples[0]
    assert question.question.endswith("Question: Who?") and question.context.endswith(LONGBENCH["context"])
    assert question.metric == "qa_f1" and question.max_new_tokens == 32
    assert len(read_tasks(path, limit=1)[0].examples) == 1


def test_longbench_prompts_ready_made(tmp_path):
    row = {"task": "lcc", "prompt": "x = 1\n", "answers": ["y = 2"], "metric": "edit_sim", "max_new_tokens": 64}
    (task,) = read_tasks(write(tmp_path / "mini.jsonl", [row]))
    (example,) = task.examples
    assert example.context is None and example.question == "x = 1\n" and not example.chat


def test_ruler_form(tmp_path):
    (task,) = read_tasks(write(tmp_path / "niah.jsonl", [RULER]))
    (example,) = task.examples
    assert example.context == "Memorize this.\nThe number is 7." and example.question == "What is the number? It is"
    assert example.metric == "found" and example.answers == ("7",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"context": "x", "question": "y"}, "line 3: expected 'answers', a list of at least one, got None"),
        (PLAIN | {"answers": []}, "line 3: expected 'answers'"),
        (PLAIN | {"answers": [" "]}, "line 3: expected 'answers'"),
        ({"text": "x", "answers": ["y"]}, "line 3: expected context, question, answers; or .* got text, answers"),
        (PLAIN | {"metric": "bleu"}, "line 3: unknown metric 'bleu'"),
        (PLAIN | {"context": 7}, "line 3: expected text in 'context', got 7"),
        ("[1]", "line 3: expected an object .* got list"),
        ('{"context": ', "line 3: not JSON"),
    ],
)
def test_wrong_lines_are_named(tmp_path, row, message):
    path = write(tmp_path / "x.jsonl", [PLAIN, "", row])
    with pytest.raises(ValueError, match=f"x.jsonl, {message}"):
        read_tasks(path)


def test_empty_and_missing_files(tmp_path):
    with pytest.raises(ValueError, match="empty: expected at least one line"):
        read_tasks(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(FileNotFoundError):
        read_tasks(tmp_path / "missing.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="latin.jsonl: expected text in UTF-8"):
        read_tasks(tmp_path / "latin.jsonl")


def test_hub(monkeypatch):
    asked = []

    def load_dataset(kind, data_files, split):
        asked.append((kind, data_files["test"], split))
        return [LONGBENCH, LONGBENCH]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (task,) = hub_tasks(["hotpotqa"], limit=1)
    assert task.name == "hotpotqa" and len(task.examples) == 1
    assert asked[0][0] == "json" and "hotpotqa.jsonl" in asked[0][1]
    with pytest.raises(ValueError, match="unknown set of LongBench 'dureader'"):
        hub_tasks(["dureader"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"kvec-jax\[eval\]"):
        hub_tasks(["hotpotqa"])
