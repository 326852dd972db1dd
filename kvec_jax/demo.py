"""``kvec demo``: hides a fact in a long text, shrinks the cache, asks for the fact.

The text is the language reference inside Python's standard library, so every machine has it. The question stands at the
end of the prompt, so a policy can see it when it chooses what to keep ("aware"); for questions that come after the
compression expect less.
"""

import dataclasses
import random
import statistics
from collections.abc import Sequence

_SEED = 0
_FACT = "The secret password of the blue house is {secret}."
_QUESTION = "What is the secret password of the blue house?"
_WORDS = "lantern orchard violin thunder velvet saffron glacier walrus marmalade cinnamon".split()  # not in the text
_ANSWER_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Row:
    """What one policy and budget did, over all places where the fact was hidden."""

    policy: str
    budget: int | float | None
    cache_bytes: float
    share: float
    right: int
    asked: int
    tokens_per_second: float


def run(
    model: str = "smollm2-135m",
    *,
    dtype: str | None = None,
    tokens: int = 2000,
    depths: int = 4,
    budgets: Sequence[int | float] = (64, 128, 256),
    secret: str = "word",
) -> list[Row]:
    """Runs the demo with a progress bar, prints its table and returns the rows of it.

    Args:
        model: What ``kvec_jax.load`` takes.
        dtype: Of weights and cache.
        tokens: Length of the text, in tokens.
        depths: In how many places, evenly spaced, the fact is hidden; one prompt each.
        budgets: Of the compressing policies.
        secret: What the fact tells, a ``"word"`` or a ``"number"``. A number is harder to keep: each of its digits is a
            token that can get lost by itself.
    """
    from rich.console import Console

    import kvec_jax as kv

    for name, value, least in (("tokens", tokens, 100), ("depths", depths, 1)):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    secrets = _secrets(secret, depths)
    trials = [("full", None, kv.FullCache())]
    trials += [("streaming", budget, kv.StreamingLLM(budget)) for budget in budgets]
    trials += [("snapkv", budget, kv.SnapKV(budget)) for budget in budgets]

    console = Console()
    console.print(f"Loading {model}", markup=False)
    lm = kv.load(model, dtype=dtype)
    prompts = make_prompts(lm.tokenizer, tokens, secrets)
    console.print(
        f"A fact is hidden at {depths} depths of {tokens:,} tokens of Python's language reference, for example\n"
        f"  [italic]{_FACT.format(secret=secrets[0])}[/italic]\n"
        f"and the prompt ends with the question: [italic]{_QUESTION}[/italic]"
    )
    rows = _ask_all(console, lm, trials, prompts)
    console.print(_table(rows))
    console.print(conclusion(rows))
    return rows


def make_prompts(tokenizer, tokens: int, secrets: Sequence[str]) -> list[tuple[str, str]]:
    """A prompt for each secret, which it hides ever deeper in ``tokens`` tokens of text, paired with the secret."""
    paragraphs = _paragraphs(tokenizer, tokens)
    prompts = []
    for index, secret in enumerate(secrets):
        place = round((index + 0.5) / len(secrets) * len(paragraphs))
        text = "\n\n".join([*paragraphs[:place], _FACT.format(secret=secret), *paragraphs[place:]])
        prompts.append((f"{text}\n\n{_QUESTION}", secret))
    return prompts


def _secrets(kind: str, count: int) -> list[str]:
    """``count`` words, repeated where there are fewer, or different numbers of four digits."""
    if kind == "word":
        return [_WORDS[index % len(_WORDS)] for index in range(count)]
    return [str(number) for number in random.Random(_SEED).sample(range(1000, 10000), count)]


def reference_text() -> str:
    """Python's language reference as plain text, about half a million characters."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name].strip() for name in sorted(topics.topics))


def _paragraphs(tokenizer, tokens: int) -> list[str]:
    """The first paragraphs of the reference that together have ``tokens`` tokens, or a little fewer."""
    chosen = []
    for paragraph in reference_text().split("\n\n"):
        tokens -= len(tokenizer.encode(paragraph + "\n\n"))
        if tokens < 0:
            return chosen
        chosen.append(paragraph)
    raise ValueError("tokens: expected no more than the reference has")


def _ask_all(console, lm, trials, prompts) -> list[Row]:
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    rows = []
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(trials) * len(prompts))
        for name, budget, policy in trials:
            bar.update(task, description=f"{name} {_budget(budget)}".strip())
            outputs = []
            for prompt, _ in prompts:
                messages = [{"role": "user", "content": prompt}]
                outputs.append(lm.generate(messages, policy=policy, max_new_tokens=_ANSWER_TOKENS))
                bar.advance(task)
            rows.append(_row(name, budget, outputs, [secret for _, secret in prompts]))
            if not console.is_terminal:  # where no bar can move
                title = f"{name} {_budget(budget)}".strip()
                console.print(f"{title}: {rows[-1].right} of {rows[-1].asked} right", highlight=False)
    return rows


def _row(name, budget, outputs, secrets) -> Row:
    stats = [output.stats for output in outputs]
    return Row(
        policy=name,
        budget=budget,
        cache_bytes=statistics.mean(each.cache_bytes for each in stats),
        share=sum(each.cache_bytes for each in stats) / sum(each.full_cache_bytes for each in stats),
        right=sum(secret in output.text.lower() for output, secret in zip(outputs, secrets, strict=True)),
        asked=len(secrets),
        tokens_per_second=statistics.median(each.tokens_per_second for each in stats),
    )


def _budget(budget: int | float | None) -> str:
    if budget is None:
        return ""
    return f"{budget:g} of the prompt" if isinstance(budget, float) else f"{budget}"


def _table(rows: Sequence[Row]):
    from rich.table import Table

    table = Table()
    table.add_column("policy")
    for title in ("budget", "cache, MB", "of full", "answers right", "tokens/s"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.policy,
            _budget(row.budget) or "all",
            f"{row.cache_bytes / 1e6:,.1f}",
            f"{row.share:.1%}",
            f"{row.right} of {row.asked}",
            f"{row.tokens_per_second:.1f}",
        )
    return table


def conclusion(rows: Sequence[Row]) -> str:
    """What the numbers say, in plain language; ``rows[0]`` is the full cache."""
    full, *others = rows
    best = min(others, key=lambda row: (-row.right, row.cache_bytes))
    if not best.right:
        return f"None of the compressed caches answered; the full one answered {full.right} of {full.asked}."
    text = (
        f"{best.policy} with a budget of {_budget(best.budget)} answered {best.right} of {best.asked} from "
        f"{best.cache_bytes / 1e6:,.1f} MB, {best.share:.1%} of the full cache, which answered {full.right}"
    )
    rivals = [row for row in others if row.budget == best.budget and row.policy != best.policy]
    text += "".join(f"; {row.policy} with the same budget answered {row.right}" for row in rivals)
    return text + "."
