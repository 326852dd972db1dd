"""Questions from one context, as one batch and one by one: ``python -m benchmarks.contexts``.

The answers must be the same, token by token. Seconds leave out compilation. The memory is that of the buffers: what the
context holds once for all questions, and what it would take for each question to hold a copy.
"""

import argparse

from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine
from kvec_jax.demo import reference_text

_ASKED = "What is {}?", "When is {} used?", "Give an example of {}.", "Who should know about {}?"
_SUBJECTS = "a class", "an assignment", "a module", "the with statement"


def main() -> None:
    """Prints the machine, then a table with one row per number of questions."""
    options = _options()
    console = Console(width=110)
    lm = kv.load(options.model, dtype=options.dtype)
    console.print(machine(options.model, lm.model.dtype), highlight=False)
    text = lm.tokenizer.decode(lm.tokenizer.encode(reference_text()[: 16 * options.tokens])[: options.tokens])
    context = lm.compress(text, kv.SnapKV(options.budget))
    questions = [asked.format(subject) for subject in _SUBJECTS for asked in _ASKED]
    pool = context.cache.pool_nbytes / 1e6
    table = Table(title=f"A context of {context.tokens:,} tokens, budget {options.budget}, {pool:.1f} MB")
    for heading in ("questions", "same tokens", "one by one, s", "together, s", "ratio", "pool, MB", "copies, MB"):
        table.add_column(heading, justify="right")
    for count in map(int, options.questions.split(",")):
        asked = [questions[i % len(questions)] for i in range(count)]
        settings = dict(max_new_tokens=options.new, eos_token_ids=())
        with console.status(f"{count} questions"):
            lm.ask(context, asked, **settings), lm.ask(context, asked[0], **settings)  # compiled
            together = lm.ask(context, asked, **settings)
            alone = [lm.ask(context, question, **settings) for question in asked]
        same = sum(a.tokens == b.tokens for a, b in zip(together, alone, strict=True))
        single = sum(_seconds(output) for output in alone)
        batch = _seconds(together[0])
        table.add_row(
            f"{count}",
            f"{same} of {count}",
            f"{single:.1f}",
            f"{batch:.1f}",
            f"{single / batch:.1f}",
            f"{pool:.1f}",
            f"{pool * count:.1f}",
        )
    console.print(table)


def _seconds(output: kv.Output) -> float:
    return output.stats.prefill_seconds + output.stats.decode_seconds


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contexts", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2000, help="of the document (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--questions", default="4,16", help="how many, a list (default: %(default)s)")
    parser.add_argument("--new", type=int, default=16, help="tokens of each answer (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
