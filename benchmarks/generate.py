"""Times of prefill and decoding, the full cache beside a compressed one: ``python -m benchmarks.generate``.

The two are measured in turn (A B A B ...) after one warm-up each, so that a slow spell of the machine meets both, and
the median is shown. The prompt is real text: Python's language reference, repeated where it is too short.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine, medians, prompt

_BUDGET = 256
_DECODE_LENGTHS = 2  # decoding is measured at the longest of the lengths


def main() -> None:
    """Prints the machine, then a table of prefill times and one of decoding speeds."""
    options = _options()
    console = Console(width=100)
    lm = kv.load(options.model, dtype=options.dtype)
    policies = {"full": kv.FullCache(), f"snapkv {options.budget}": kv.SnapKV(budget=options.budget)}
    console.print(machine(options.model, lm.model.dtype, options.runs), highlight=False)

    with console.status("reading prompts"):
        rows = [(length, _prefill_times(lm, length, policies, options)) for length in options.lengths]
    console.print("\nPrefill of one prompt, seconds (compression included)")
    console.print(_table(["tokens"], rows, "{:.2f}"))
    settings = [(length, batch) for length in options.lengths[-_DECODE_LENGTHS:] for batch in options.batch]
    with console.status("decoding"):
        rows = [(*setting, _decode_rates(lm, *setting, policies, options)) for setting in settings]
    console.print("\nDecoding, tokens per second over the batch")
    console.print(_table(["tokens", "batch"], rows, "{:.1f}"))


def _options() -> argparse.Namespace:
    def numbers(text):
        return sorted(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", type=int, default=_BUDGET, help="tokens per head (default: %(default)s)")
    parser.add_argument("--lengths", type=numbers, default="1024,2048,4096,8000", metavar="N,N", help="prompt tokens")
    parser.add_argument("--batch", type=numbers, default="1,8", metavar="N,N", help="batch sizes for decoding")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each (default: %(default)s)")
    parser.add_argument("--decode-tokens", type=int, default=32, help="tokens per run (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="1024 and 2048 tokens, batch 1, 1 run")
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.batch, options.runs = [1024, 2048], [1], 1
    return options


def _prefill_times(lm, length: int, policies: dict, options) -> dict[str, float]:
    tokens, lengths = prompt(lm, length), jnp.array([length], jnp.int32)

    def prefill(policy):
        jax.block_until_ready(kv.prefill(lm.model, tokens, lengths, policy, reserve=options.decode_tokens))

    return medians({name: functools.partial(prefill, policy) for name, policy in policies.items()}, options.runs)


def _decode_rates(lm, length: int, batch: int, policies: dict, options) -> dict[str, float]:
    tokens, lengths = prompt(lm, length), jnp.array([length], jnp.int32)
    steps = options.decode_tokens
    started = {name: kv.prefill(lm.model, tokens, lengths, policy, reserve=steps) for name, policy in policies.items()}

    def prepare(name):
        logits, cache = started[name]
        tiled = cache.take_rows(jnp.zeros(batch, jnp.int32))  # a copy: decoding may take over the buffers it is given
        return jax.block_until_ready(tiled), jnp.tile(logits, (batch, 1))

    def decode(state):
        cache, logits = state
        key = jax.random.key(0)
        done = kv.decode(lm.model, cache, logits, kv.Greedy(), key, max_new_tokens=steps, eos_token_ids=())
        jax.block_until_ready(done)

    seconds = medians(dict.fromkeys(policies, decode), options.runs, prepare)
    return {name: batch * steps / value for name, value in seconds.items()}


def _table(headings: list[str], rows: list[tuple], form: str) -> Table:
    """One row per setting: its numbers, the value of each policy, and the last value over the first."""
    table = Table()
    for heading in [*headings, *rows[0][-1], "ratio"]:
        table.add_column(heading, justify="right")
    for *setting, values in rows:
        first, *_, last = values.values()
        cells = [form.format(value) for value in values.values()]
        table.add_row(*(f"{number:,}" for number in setting), *cells, f"{last / first:.2f}")
    return table


if __name__ == "__main__":
    main()
