"""A long text from a cache of fixed size: ``python -m benchmarks.rolling``.

Prints what the program holds beside its arguments, as XLA reports it, for ever longer generations with a limited tail
and without; then the text of the longest, to be read, with the share of its runs of four words that occur once.
"""

import argparse
import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine
from kvec_jax.demo import reference_text
from kvec_jax.policies.options import make_policy


def main() -> None:
    """Prints the machine, a table with one row per length, and a text."""
    options = _options()
    console = Console(width=110)
    lm = kv.load(options.model, dtype=options.dtype)
    console.print(machine(options.model, lm.model.dtype), highlight=False)
    tokens, lengths = _prompt(lm, options.tokens)
    policy = make_policy(options.policy, options.budget)
    table = Table(title=f"Program, MB: {options.tokens:,} tokens read, {options.policy} {options.budget}")
    for heading in ("generated", f"tail {options.tail}", "no limit"):
        table.add_column(heading, justify="right")

    def program(new, tail):
        def run(model, tokens, lengths):
            return kv.generate(
                model, tokens, lengths, policy, _SAMPLER, jax.random.key(0), new, eos_token_ids=(), tail=tail
            )

        return jax.jit(run).lower(lm.model, tokens, lengths).compile()

    for new in (options.new // 4, options.new // 2, options.new):
        with console.status(f"{new:,} tokens"):
            limited, free = program(new, options.tail), program(new, None)
        table.add_row(f"{new:,}", _megabytes(limited), _megabytes(free))
    console.print(table)
    start = time.perf_counter()
    written = np.asarray(limited(lm.model, tokens, lengths))[0].tolist()
    seconds = time.perf_counter() - start
    text = lm.tokenizer.decode(written)
    console.print(
        f"{len(written):,} tokens in {seconds:.0f} s; {_once(text):.1%} of all four words in a row occur once"
    )
    console.print(text, markup=False, highlight=False)


_SAMPLER = kv.Sample(temperature=0.8, top_p=0.95)


def _prompt(lm, length: int):
    text = lm.tokenizer.decode(lm.tokenizer.encode(reference_text()[: 16 * length])[: length - 100])
    messages = [{"role": "user", "content": f"{text}\n\nExplain all of this at length, in your own words."}]
    ids = np.array([lm.encode(messages)], np.int32)
    return ids, np.array([ids.shape[1]], np.int32)


def _megabytes(program) -> str:
    memory = program.memory_analysis()
    return f"{(memory.temp_size_in_bytes + memory.output_size_in_bytes) / 1e6:.1f}"


def _once(text: str) -> float:
    words = text.split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return sum(runs.count(run) == 1 for run in runs) / max(len(runs), 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rolling", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=4000, help="to generate (default: %(default)s)")
    parser.add_argument("--policy", default="snapkv")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tail", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    main()
