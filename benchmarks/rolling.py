"""A long text from a cache of fixed size: ``python -m benchmarks.rolling``.

Prints the process's memory as the text grows, and then the text itself, to be read, with the share of its runs of four
words that occur once. ``--tail 0`` keeps all that is generated, for comparison. With ``--chunk`` the prompt is
compressed while it is read, so that it may be long too; "most so far" then shows what reading it took. With
``--rerotate`` prompt and text may be longer than the model's context. Without a repetition penalty a small model
that may not stop goes round in circles, whatever is kept.
"""

import argparse
import pathlib
import resource
import time

import jax
from rich.console import Console

import kvec_jax as kv
from benchmarks.common import machine
from kvec_jax.demo import reference_text
from kvec_jax.policies.options import make_policy

_EVERY = 500


def main() -> None:
    """Prints the machine, a line every few hundred tokens, and the text."""
    options = _options()
    console = Console(width=110, highlight=False)
    lm = kv.load(options.model, dtype=options.dtype)
    console.print(machine(options.model, lm.model.dtype))
    console.print(
        f"{options.policy}, pool {options.budget}, tail {options.tail or 'without limit'}, the prompt read "
        f"{f'{options.chunk:,} tokens at a time' if options.chunk else 'at once'}; before it {_memory()}"
    )
    watch = _Watch(console, lm.tokenizer)
    output = lm.generate(
        _messages(lm, options.tokens),
        policy=make_policy(options.policy, options.budget),
        max_new_tokens=options.new,
        sampler=kv.Sample(
            temperature=0.8, top_p=0.95, repetition_penalty=options.repetition_penalty, repetition_window=256
        ),
        key=jax.random.key(options.seed),
        stream=watch,
        eos_token_ids=(),
        tail=options.tail or None,
        chunk=options.chunk,
        rerotate=options.rerotate,
    )
    stats = output.stats
    console.print(
        f"{stats.prompt_tokens:,} tokens read in {stats.prefill_seconds:.0f} s, {stats.new_tokens:,} written at "
        f"{stats.tokens_per_second:.1f} a second; {_once(output.text):.1%} of all runs of four words occur once\n"
    )
    console.print(output.text, markup=False)


class _Watch:
    """Prints the memory of the process every so many tokens."""

    def __init__(self, console: Console, tokenizer):
        self._console, self._tokenizer = console, tokenizer
        self._text, self._next, self._start = "", 0, time.perf_counter()

    def __call__(self, piece: str) -> None:
        self._text += piece
        count = len(self._tokenizer.encode(self._text))
        if count >= self._next:
            seconds = time.perf_counter() - self._start
            self._console.print(f"{count:6,} tokens, {seconds:6.0f} s, {_memory()}")
            self._next += _EVERY


def _memory() -> str:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{pages * resource.getpagesize() / 1e6:,.0f} MB resident, most so far {most * 1024 / 1e6:,.0f}"


def _messages(lm, length: int) -> list[dict]:
    """A question about as much of the reference as makes ``length`` tokens with it, or a few less."""
    text = lm.tokenizer.decode(lm.tokenizer.encode(reference_text()[: 16 * length])[: length - 60])
    return [{"role": "user", "content": f"{text}\n\nExplain all of this at length, in your own words."}]


def _once(text: str) -> float:
    words = text.split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return sum(runs.count(run) == 1 for run in runs) / max(len(runs), 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rolling", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt (default: %(default)s)")
    parser.add_argument("--chunk", type=int, help="read the prompt so many tokens at a time (default: at once)")
    parser.add_argument("--rerotate", action="store_true", help="so that the text may go on beyond the context")
    parser.add_argument("--new", type=int, default=4000, help="to generate (default: %(default)s)")
    parser.add_argument("--policy", default="snapkv")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tail", type=int, default=512)
    parser.add_argument("--repetition-penalty", type=float, default=1.1, help="1: none (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
