"""What it costs to keep rows in fewer bits: ``python -m benchmarks.quantised``.

A text is read and compressed; then the tokens that follow it are read, and their logits compared with those from the
same rows as they are: the mean Kullback-Leibler divergence, how often the most likely token is the same, and the
largest difference of a logit. ``bfloat16`` is the pool rounded to it.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine, prompt
from benchmarks.policies import make


def main() -> None:
    """Prints the machine, then a table with one row per policy and way to keep rows."""
    options = _options()
    console = Console(width=110)
    lm = kv.load(options.model, dtype=options.dtype)
    console.print(machine(options.model, lm.model.dtype), highlight=False)
    tokens = prompt(lm, options.tokens + options.following)
    text, following = tokens[:, : options.tokens], tokens[:, options.tokens :]
    table = Table(title=f"{options.following} tokens after {options.tokens:,}, budget {options.budget}")
    for heading in ("policy", "rows", "pool, MB", "of bfloat16", "KL", "same token", "largest error"):
        table.add_column(heading, justify="left" if heading in ("policy", "rows") else "right")
    for name in options.policies.split(","):
        policy = kv.FullCache() if name == "full" else make(name, options.budget, options.model)
        lengths = jnp.array([options.tokens], jnp.int32)
        with console.status(name):
            _, cache = kv.prefill(lm.model, text, lengths, policy, reserve=options.following)
            exact, _ = kv.extend(lm.model, cache, following, all_logits=True)
            half = _bytes(cache) * 2 / cache.keys.dtype.itemsize
            for rows, small in (
                ("bfloat16", _rounded(cache)),
                ("int8", kv.quantise(cache, "int8")),
                ("int4", kv.quantise(cache, "int4")),
            ):
                logits, _ = kv.extend(lm.model, small, following, all_logits=True)
                size = half if rows == "bfloat16" else small.pool_nbytes
                table.add_row(name, rows, f"{size / 1e6:.2f}", f"{size / half:.2f}", *_errors(exact, logits))
    console.print(table)


def _bytes(cache: kv.CompressedKV) -> int:
    return cache.keys.nbytes + cache.values.nbytes


def _rounded(cache: kv.CompressedKV) -> kv.CompressedKV:
    keys, values = (x.astype(jnp.bfloat16).astype(x.dtype) for x in (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


def _errors(exact: jax.Array, logits: jax.Array) -> tuple[str, str, str]:
    a, b = jax.nn.log_softmax(exact[0]), jax.nn.log_softmax(logits[0])
    divergence = float(jnp.mean(jnp.sum(jnp.exp(a) * (a - b), axis=-1)))
    same = float(jnp.mean(jnp.argmax(a, axis=-1) == jnp.argmax(b, axis=-1)))
    return f"{divergence:.1e}", f"{same:.1%}", f"{float(jnp.abs(exact - logits).max()):.3f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--following", type=int, default=128)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--policies", default="full,snapkv,laprox")
    return parser.parse_args()


if __name__ == "__main__":
    main()
