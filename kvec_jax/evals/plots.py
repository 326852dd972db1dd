"""Pictures of an evaluation, drawn from its results."""

import pathlib

import numpy as np

from kvec_jax.evals.summary import ALL, Results, budget_of, table
from kvec_jax.evals.trials import FULL
from kvec_jax.files import replacing

_DEPTHS = 8  # rows of a heat map, at most
_NAMES = {"score": "score", "kl": "KL from the full cache", "nll": "NLL of the right answer"}


def draw_all(results: Results, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws everything that the results allow; the files."""
    drawn = []
    for protocol in results.protocols:
        for measure in _NAMES:
            drawn.append(_save(by_budget(results, protocol, measure), folder / f"{measure}-{protocol}.png"))
        drawn.append(_save(by_bytes(results, protocol), folder / f"bytes-{protocol}.png"))
        for task in results.tasks(protocol):
            figures = {"depth": by_depth(results, protocol, task), "kept": kept(results, protocol, task)}
            for kind, figure in figures.items():
                if figure is not None:
                    drawn.append(_save(figure, folder / f"{kind}-{protocol}-{task}.png"))
    return drawn


def by_budget(results: Results, protocol: str, measure: str):
    """A measure against the entries kept per head, a panel for each task."""
    tasks = results.tasks(protocol)
    figure, axes = _panels(len(tasks), 4.2, 3.2)
    for axis, task in zip(axes, tasks, strict=False):
        examples = results.of(protocol, task)
        tokens = np.mean([example["prompt_tokens"] for example in examples])
        points = {}
        for row in table(results, protocol, task):
            policy, budget = budget_of(row.trial)
            kept = float(budget) if budget.isdigit() else row.means["kept"].mean * tokens
            points.setdefault(policy, []).append((kept, row.means[measure]))
        for policy, mine in points.items():
            _line(axis, results, protocol, policy, mine)
        ticks = sorted({round(x) for policy, mine in points.items() if policy != FULL for x, _ in mine})
        axis.set(title=task, xlabel="entries kept per head", ylabel=_NAMES[measure], xscale="log")
        axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axis.minorticks_off()
    _legend(figure, axes, f"{results.about.get('model', '')}, {protocol}: {_NAMES[measure]}, 95 % intervals")
    return figure


def by_bytes(results: Results, protocol: str):
    """The mean score over all tasks against the bytes of the cache."""
    figure, (axis,) = _panels(1, 6.4, 4.2)
    points = {}
    for row in table(results, protocol, ALL):
        size = row.means["cache_bytes"].mean / 1e6
        points.setdefault(budget_of(row.trial)[0], []).append((size, row.means["score"]))
    for policy, mine in points.items():
        _line(axis, results, protocol, policy, mine, level=False)
    ticks = sorted({float(f"{x:.2g}") for mine in points.values() for x, _ in mine})
    axis.set(xlabel="cache, MB", ylabel="score, mean over tasks", xscale="log")
    axis.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    _legend(figure, [axis], f"{results.about.get('model', '')}, {protocol}: quality against size")
    return figure


def _line(axis, results: Results, protocol: str, policy: str, points: list, level: bool = True) -> None:
    """A policy's means with their intervals; the full cache as a level, if wanted."""
    policies = list(dict.fromkeys(budget_of(trial)[0] for trial in results.trials(protocol)))
    number = policies.index(policy)
    points = sorted(points, key=lambda point: point[0])
    means = [mean for _, mean in points]
    if policy == FULL and level:
        axis.axhline(means[0].mean, color="black", linestyle="--", linewidth=1, label=policy)
        return
    # Policies stand side by side, or those with equal means would hide one another.
    x = [value * 1.02 ** (number - len(policies) / 2) for value, _ in points]
    errors = np.maximum(0, [[mean.mean - mean.low for mean in means], [mean.high - mean.mean for mean in means]])
    color = "black" if policy == FULL else f"C{number % 10}"
    style = dict(color=color, marker="o", markersize=4, linewidth=1, capsize=2)
    axis.errorbar(x, [mean.mean for mean in means], errors, label=policy, **style)


def by_depth(results: Results, protocol: str, task: str):
    """Heat maps, depth by length, of each policy and budget; ``None`` for a task without depths."""
    examples = [example for example in results.of(protocol, task) if example["depth"] is not None]
    lengths = sorted({example["length"] for example in examples if example["length"]})
    if not examples or not lengths:
        return None
    trials = results.trials(protocol)
    policies = list(dict.fromkeys(budget_of(trial)[0] for trial in trials))
    columns = max(sum(budget_of(trial)[0] == policy for trial in trials) for policy in policies)
    depths = min(_DEPTHS, len({example["depth"] for example in examples}))
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.2 * columns + 1.2, 1.7 * len(policies) + 0.6), layout="constrained")
    axes = figure.subplots(len(policies), columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for row, policy in zip(axes, policies, strict=True):
        mine = [trial for trial in trials if budget_of(trial)[0] == policy]
        for axis, trial in zip(row, mine, strict=False):
            grid = _grid(examples, trial, lengths, depths)
            image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axis.set_title(trial, fontsize=7)
            axis.set_xticks(range(len(lengths)), labels=[str(length) for length in lengths], fontsize=7)
            edges = [f"{(i + 0.5) / depths:.0%}" for i in range(depths)]
            axis.set_yticks(range(depths), labels=edges, fontsize=7)
        for axis in row[len(mine) :]:
            axis.set_visible(False)
    figure.colorbar(image, ax=axes, label="score", shrink=0.6)
    figure.suptitle(f"{task}, {protocol}: depth by length", fontsize=10)
    return figure


def kept(results: Results, protocol: str, task: str):
    """Where each head of each layer keeps entries of one prompt, with each policy's middle budget."""
    example = next((e for e in results.of(protocol, task) if any(r.get("where") for r in e["results"].values())), None)
    if example is None:
        return None
    by_policy = {}
    for trial, result in example["results"].items():
        if result.get("where") and budget_of(trial)[0] != FULL:
            by_policy.setdefault(budget_of(trial)[0], []).append((trial, result["where"]))
    if not by_policy:
        return None
    figure, axes = _panels(len(by_policy), 4.0, 3.4)
    for axis, trials in zip(axes, by_policy.values(), strict=False):
        trial, where = trials[len(trials) // 2]
        share = np.array(where) / (example["prompt_tokens"] / len(where[0]))
        image = axis.imshow(share, vmin=0, vmax=1, cmap="magma", aspect="auto", extent=(0, 100, len(where), 0))
        axis.set_title(trial, fontsize=9)
        axis.set(xlabel="position, % of the prompt", ylabel="layer and head")
    figure.colorbar(image, ax=list(axes), label="share kept", shrink=0.7)
    depth = "" if example["depth"] is None else f", answer at {example['depth']:.0%}"
    figure.suptitle(f"{task}, {protocol}: kept of one prompt of {example['prompt_tokens']} tokens{depth}", fontsize=10)
    return figure


def _grid(examples: list[dict], trial: str, lengths: list[int], depths: int) -> np.ndarray:
    """Mean scores [depths, lengths]; NaN where there is no example."""
    grid = np.full((depths, len(lengths)), np.nan)
    for i in range(depths):
        for j, length in enumerate(lengths):
            scores = [
                example["results"][trial]["score"]
                for example in examples
                if example["length"] == length and int(example["depth"] * depths) == i and trial in example["results"]
            ]
            if scores:
                grid[i, j] = np.mean(scores)
    return grid


def check_matplotlib() -> None:
    """Raises ``ImportError``, with the extra that brings it, where matplotlib isn't installed."""
    try:
        import matplotlib.figure  # noqa: F401 - slow to import, and not needed for tables
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'kvec-jax[eval]', or say --no-pictures") from error


def _panels(count: int, width: float, height: float):
    columns = min(count, 3)
    rows = -(-count // columns)
    size = max(width * columns, 6.4), height * rows + 0.7
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes


def _legend(figure, axes, title: str) -> None:
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), fontsize=8)
    figure.suptitle(title, fontsize=10)


def _save(figure, path: pathlib.Path) -> pathlib.Path:
    """Writes a picture whole or not at all; the same results give the same bytes."""
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=130, metadata={"Software": None})
    return path
