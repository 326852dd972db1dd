"""The command line: what it passes on, what it prints, and how it fails."""

import argparse
import pathlib
import subprocess
import sys

import pytest

import kvec_jax as kv
from kvec_jax import cli, demo
from kvec_jax.session import Stats

GOLDENS = pathlib.Path(__file__).parent / "goldens"
STATS = Stats(
    prompt_tokens=1000,
    new_tokens=8,
    kept=200,
    total=1000,
    cache_bytes=2_000_000,
    full_cache_bytes=10_000_000,
    compile_seconds=3.0,
    prefill_seconds=1.5,
    decode_seconds=0.5,
    tokens_per_second=16.0,
)


class FakeTokenizer:
    def encode(self, text):
        return text.split()


class FakeModel:
    """Stands in for a ``LanguageModel``; answers with the secret if the policy keeps everything."""

    def __init__(self):
        self.tokenizer = FakeTokenizer()
        self.calls = []

    def generate(self, prompt, **arguments):
        self.calls.append((prompt, arguments))
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        full = arguments["policy"] == kv.FullCache()
        secret = question.partition("blue house is ")[2].partition(".")[0]
        answer = f"It is {secret}." if full else "I can't tell."
        if arguments.get("stream"):
            for piece in answer.split(" "):
                arguments["stream"](piece + " ")
        return kv.Output(text=answer, tokens=[1, 2], stats=STATS)


@pytest.fixture
def fake(monkeypatch):
    model = FakeModel()
    monkeypatch.setattr(kv, "load", lambda name, **arguments: model)
    return model


def run(capsys, *argv):
    """Exit status, standard output, standard error."""
    try:
        status = cli.main(argv)
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_generate_puts_the_file_before_the_question(fake, capsys, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("Zoë's report.\n")
    status, out, err = run(capsys, "generate", "Who?", "--file", str(path), "--policy", "snapkv", "--budget", "128")
    assert status == 0
    prompt, arguments = fake.calls[0]
    assert prompt == [{"role": "user", "content": "Zoë's report.\n\nWho?"}]
    assert arguments["policy"] == kv.SnapKV(budget=128)
    assert arguments["sampler"] == kv.Greedy()
    assert out == "I can't tell.\n"
    assert "20.0% of the full cache's 10.0 MB" in err and err.count("\n") == 1


def test_generate_streams_what_it_returns(fake, capsys):
    status, out, _ = run(capsys, "generate", "Who?", "--stream", "--policy", "streaming")
    assert (status, out) == (0, "I can't tell. \n")
    assert fake.calls[0][1]["policy"] == kv.StreamingLLM(budget=256)


def test_generate_raw_prompt_and_sampling(fake, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", argparse.Namespace(read=lambda: "Once upon"))
    status, *_ = run(capsys, "generate", "-", "--raw", "--temperature", "0.7", "--top-p", "0.9")
    assert status == 0
    prompt, arguments = fake.calls[0]
    assert prompt == "Once upon"
    assert arguments["sampler"] == kv.Sample(temperature=0.7, top_p=0.9)
    run(capsys, "generate", "x", "--repetition-penalty", "1.1", "--repetition-window", "9")
    assert fake.calls[1][1]["sampler"] == kv.Greedy(repetition_penalty=1.1, repetition_window=9)


def test_generate_takes_every_policy_by_name(fake, capsys):
    for name in kv.policies.names():
        assert run(capsys, "generate", "Who?", "--policy", name)[0] == 0


def test_generate_passes_on_what_limits_the_memory(fake, capsys):
    run(capsys, "generate", "Who?", "--chunk", "512", "--tail", "64", "--cache-dtype", "int8")
    limits = {name: fake.calls[0][1][name] for name in ("chunk", "tail", "cache_dtype")}
    assert limits == dict(chunk=512, tail=64, cache_dtype="int8")


def test_generate_passes_on_settings(fake, capsys):
    run(capsys, "generate", "Who?", "--policy", "snapkv", "--set", "window=16", "--set", "pooling=avg")
    assert fake.calls[0][1]["policy"] == kv.SnapKV(budget=256, window=16, pooling="avg")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["generate"], "required: prompt"),
        (["generate", "x", "--policy", "snapvk"], "unknown policy 'snapvk'; did you mean 'snapkv'?"),
        (["generate", "x", "--budget", "64"], "takes no --budget"),
        (["generate", "x", "--policy", "snapkv", "--budget", "many"], "got 'many'"),
        (["generate", "x", "--policy", "snapkv", "--budget", "0"], "at least"),
        (["generate", "x", "--policy", "snapkv", "--budget=-1"], "at least"),
        (["generate", "x", "--policy", "snapkv", "--budget", "1.5"], "got 1.5"),
        (["generate", "x", "--policy", "snapkv", "--budget", "nan"], "got nan"),
        (["generate", "x", "--policy", "snapkv", "--set", "windw=16"], "no setting 'windw'; it has: window, kernel"),
        (["generate", "x", "--policy", "snapkv", "--set", "window=wide"], "got 'wide'"),
        (["generate", "x", "--policy", "snapkv", "--set", "window"], "expected KEY=VALUE"),
        (["generate", "x", "--policy", "adakv", "--set", "scorer=1"], "no setting 'scorer'"),
        (["generate", "x", "--policy", "compresskv", "--model", "my/own"], "kvec calibrate my/own --out FILE"),
        (["generate", "x", "--policy", "snapkv", "--calibration", "a.json"], "no setting 'calibration'"),
        (["calibrate", "x"], "required: --out"),
        (["calibrate", "x", "--out", "a.json", "--lengths", "256,long"], "got '256,long'"),
        (["calibrate", "x", "--out", "a.json", "--lengths", "16"], "lengths: expected an integer, 64 or more, got 16"),
        (["calibrate", "x", "--out", "a.json", "--episodes", "0"], "episodes: expected an integer, 1 or more"),
        (["calibrate", "x", "--out", "a.json", "--text", "no/such/file"], "no/such/file: no such file"),
        (["generate", "x", "--top-k", "5"], "--top-k needs a --temperature above 0"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--policy", "expected", "--set", "covariance=no"], "covariance: expected True or False"),
        (["generate", "x", "--repetition-penalty", "0"], "repetition_penalty: expected above 0, got 0.0"),
        (["generate", "x", "--file", "no/such/file"], "no/such/file: no such file"),
        (["generate", "x", "--file", "."], ".: is a directory"),
        (["demo", "--tokens", "7"], "tokens: expected at least 100, got 7"),
        (["demo", "--depths", "0"], "depths: expected at least 1, got 0"),
        (["demo", "--budgets", "64,x"], "got 'x'"),
    ],
)
def test_user_errors_are_one_line_and_status_2(fake, capsys, argv, message):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert message in err and err.startswith("kvec") and err.count("\n") == 1


def test_text_that_is_not_utf8(fake, capsys, tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    status, _, err = run(capsys, "generate", "x", "--file", str(path))
    assert status == 2 and "expected text in UTF-8" in err


@pytest.mark.parametrize("model", ["no-such-model", "no/such/folder", "missing.gguf"])
def test_unknown_model_is_one_line(capsys, monkeypatch, model, tmp_path):
    monkeypatch.setenv("KVEC_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, _, err = run(capsys, "generate", "x", "--model", model)
    assert status == 2 and model in err and err.count("\n") == 1


def test_interrupt_gives_130(capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(kv, "load", interrupt)
    assert run(capsys, "generate", "x")[0] == 130


def test_bugs_are_not_hidden(capsys, monkeypatch):
    def fail(*_, **__):
        raise KeyError("a bug")

    monkeypatch.setattr(kv, "load", fail)
    with pytest.raises(KeyError):
        cli.main(["generate", "x"])


def test_models_lists_the_default_one(capsys):
    status, out, _ = run(capsys, "models")
    assert status == 0 and "smollm2-135m" in out and "Apache-2.0" in out


def test_demo_shows_a_row_for_each_policy_and_budget(fake, capsys):
    status, out, _ = run(capsys, "demo", "--tokens", "500", "--depths", "3", "--budgets", "64,0.25")
    assert status == 0
    assert len(fake.calls) == 3 * 5
    out = " ".join(out.split())  # wherever the terminal wraps
    assert "3 of 3" in out and "0 of 3" in out and "0.25 of the prompt" in out
    assert "None of the compressed caches answered; the full one answered 3 of 3." in out


def test_demo_prompts_hide_secrets_ever_deeper():
    secrets = ["7001", "7002", "7003", "7004"]
    prompts = demo.make_prompts(FakeTokenizer(), 1000, secrets)
    places = [prompt.index(secret) / len(prompt) for prompt, secret in prompts]
    assert places == sorted(places) and places[0] < 0.25 and places[-1] > 0.75
    for (prompt, hidden), secret in zip(prompts, secrets, strict=True):
        assert hidden == secret and prompt.count(secret) == 1
        assert 800 < len(prompt.split()) < 1050
        assert prompt.endswith("house?")


def test_demo_secrets_are_not_in_the_text():
    text = demo.reference_text().lower()
    assert not [word for word in demo._WORDS if word in text]


def test_demo_hides_numbers_too(fake, capsys):
    run(capsys, "demo", "--tokens", "500", "--depths", "2", "--budgets", "64", "--secret", "number")
    facts = [prompt[0]["content"].partition("blue house is ")[2][:5] for prompt, _ in fake.calls[:2]]
    assert all(fact[:4].isdigit() and fact[4] == "." for fact in facts) and facts[0] != facts[1]


def test_demo_conclusion_follows_the_numbers():
    def row(policy, budget, right, size):
        return demo.Row(policy, budget, size, size / 100e6, right, 5, 10.0)

    rows = [row("full", None, 5, 100e6), row("streaming", 64, 1, 3e6), row("snapkv", 64, 4, 3e6)]
    assert demo.conclusion(rows) == (
        "snapkv with a budget of 64 answered 4 of 5 from 3.0 MB, 3.0% of the full cache, which answered 5; "
        "streaming with the same budget answered 1."
    )
    lost = [row("full", None, 5, 100e6), row("streaming", 64, 0, 3e6)]
    assert demo.conclusion(lost) == "None of the compressed caches answered; the full one answered 5 of 5."


def test_help_needs_no_model(tmp_path):
    done = subprocess.run([sys.executable, "-m", "kvec_jax.cli", "--help"], capture_output=True, text=True, check=True)
    assert "generate" in done.stdout and "demo" in done.stdout


def test_models_show_tells_what_the_cache_takes(capsys):
    status, out, _ = run(capsys, "models", "show", str(GOLDENS / "gemma3"), "--budget", "128")
    assert status == 0
    assert "6 layers, 5 of them local (window 32)" in out
    # One global layer of one head of 16: 2 * 2 * 16 bytes a token, and five windows of 32 tokens.
    assert f"{(8192 + 5 * 32) * 64 / 1e6:,.1f} MB" in out and f"{(128 + 5 * 32) * 64 / 1e6:,.1f} MB" in out


def test_models_show_of_nothing_is_one_line(capsys):
    status, _, err = run(capsys, "models", "show", "nosuch.gguf")
    assert status == 2 and "nosuch.gguf" in err and len(err.splitlines()) == 1
