"""The report of an evaluation: tables in Markdown, all numbers in CSV, times apart, and pictures."""

import csv
import io
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterable

from kvec_jax.evals.run import RESULTS
from kvec_jax.evals.summary import ALL, MEASURES, Results, Row, budget_of, table
from kvec_jax.evals.trials import BASELINE
from kvec_jax.files import write_whole

_PROTOCOLS = {
    "aware": "the question is part of the prompt that is compressed, as in the papers on eviction",
    "agnostic": "only the context is compressed, and the question comes after, as in kvpress",
}


def write_report(folder: str | os.PathLike, *, pictures: bool = True) -> list[pathlib.Path]:
    """Writes tables and pictures of the results in a folder, in place of older ones.

    Everything but ``times.md`` depends on the results alone, and not on how long they took.

    Args:
        folder: Where ``evaluate`` wrote.
        pictures: Whether to draw, too.

    Returns:
        The files.

    Raises:
        ValueError: If the folder holds no results.
        OSError: If it can't be read or written.
        ImportError: For pictures, if matplotlib isn't there; it names the extra. The tables have been written then.
    """
    folder = pathlib.Path(folder)
    results = Results.read(folder / RESULTS)
    texts = {"report.md": markdown(results), "report.csv": comma_separated(results), "times.md": times(results)}
    for name, text in texts.items():
        write_whole(folder / name, text)
    written = [folder / name for name in texts]
    if pictures:
        from kvec_jax.evals.plots import draw_all

        written += draw_all(results, folder)
    return written


def markdown(results: Results) -> str:
    """The tables of all protocols and tasks."""
    about = ", ".join(f"{name} {_plain(value)}" for name, value in results.about.items())
    parts = [
        f"# Evaluation of {results.about.get('model', 'a model')}",
        f"{about}.",
        "Means with 95 % bootstrap intervals over examples. *Gain*: mean paired difference of the score to "
        f"{BASELINE} with the same budget; *KL gain*: likewise of the divergence, of which less is better. *NLL*: "
        "negative log-likelihood of the right answer, per token. *KL*: mean divergence from the full cache's "
        "next-token distributions along the right answer; *same top*: share of its tokens before which the most likely "
        "token is the full cache's. *Coverage*: share of the prompt that any head of any layer keeps. *Kept*: share of "
        "the entries. Budgets are tokens per key-value head, or shares.",
    ]
    for protocol in results.protocols:
        parts.append(f"## Protocol {protocol}: {_PROTOCOLS[protocol]}")
        tasks = results.tasks(protocol)
        for task in [*tasks, *([ALL] if len(tasks) > 1 else [])]:
            rows = table(results, protocol, task)
            lengths = results.lengths(protocol, task)
            told = f", prompts of {', '.join(map(str, lengths))} tokens" if lengths else ""
            if rows:
                parts.append(f"### {task}: {_counts(rows)} examples{told}")
                parts.append(_table(rows))
    return "\n\n".join(parts) + "\n"


def _counts(rows: Iterable[Row]) -> str:
    counts = sorted({row.examples for row in rows})
    return "-".join(map(str, dict.fromkeys([counts[0], counts[-1]])))


def _table(rows: list[Row]) -> str:
    lines = [
        "| policy | budget | score | gain | NLL | KL | KL gain | same top | coverage | kept | cache, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        policy, budget = budget_of(row.trial)
        means = row.means
        cells = (
            policy,
            budget,
            f"{means['score']:.3f}",
            f"{row.gains['score']:+.3f}" if row.gains else "",
            f"{means['nll']:.3f}",
            f"{means['kl']:.3f}",
            f"{row.gains['kl']:+.3f}" if row.gains else "",
            f"{means['agreement'].mean:.3f}",
            f"{means['coverage'].mean:.3f}",
            f"{means['kept'].mean:.3f}",
            f"{means['cache_bytes'].mean / 1e6:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def comma_separated(results: Results) -> str:
    """All means: a line for each task, length, trial and measure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["protocol", "task", "length", "policy", "budget", "measure", "examples", "mean", "low", "high"])
    for protocol in results.protocols:
        tasks = results.tasks(protocol)
        for task in [*tasks, *([ALL] if len(tasks) > 1 else [])]:
            for length in [None, *(results.lengths(protocol, task) if task != ALL else [])]:
                for row in table(results, protocol, task, length):
                    measures = {name: row.means[name] for name in MEASURES}
                    measures |= {f"{name} less {BASELINE}'s": gain for name, gain in row.gains.items()}
                    start = [protocol, task, length or "all", *budget_of(row.trial)]
                    for name, mean in measures.items():
                        writer.writerow([*start, name, row.examples, *(f"{value:.6g}" for value in mean)])
    return text.getvalue()


def times(results: Results) -> str:
    """How long reading and answering took, where that was measured; these differ from run to run."""
    groups = defaultdict(list)
    for example in results.examples:
        for trial, result in example["results"].items():
            groups[example["protocol"], example["task"], example["length"] or 0, trial].append((example, result))
    lines = [
        "# Times",
        "",
        "Per prompt. *Read*: seconds to read a prompt and compress it, for as many policies and budgets together as "
        "the next column says. *Answer*: tokens generated per second, prompts of a batch counted together.",
        "",
        "| protocol | task | tokens | policy | budget | read, s | together | answer, tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (protocol, task, _, trial), pairs in sorted(groups.items()):
        policy, budget = budget_of(trial)
        count = len(pairs)
        tokens = sum(example["prompt_tokens"] for example, _ in pairs) / count
        read = sum(result["prefill_seconds"] for _, result in pairs) / count
        spent = sum(result["decode_seconds"] for _, result in pairs)
        speed = f"{sum(result['new_tokens'] for _, result in pairs) / spent:.1f}" if spent else ""
        together = "-".join(map(str, sorted({result["read_together"] for _, result in pairs})))
        lines.append(
            f"| {protocol} | {task} | {tokens:.0f} | {policy} | {budget} | {read:.2f} | {together} | {speed} |"
        )
    return "\n".join(lines) + "\n"


def _plain(value) -> str:
    return " ".join(f"{name} {each}" for name, each in value.items()) if isinstance(value, dict) else str(value)
