"""What reading in chunks changes: ``python -m benchmarks.chunks``.

A text is read at once and in chunks, with the same policy. Shown are the share of kept entries that are the same, and,
for the tokens that follow, the mean Kullback-Leibler divergence from what the full cache gives.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine, prompt
from kvec_jax.policies.options import make_policy


def main() -> None:
    """Prints the machine, then a table with one row per policy and chunk."""
    options = _options()
    console = Console(width=110)
    lm = kv.load(options.model, dtype=options.dtype)
    console.print(machine(options.model, lm.model.dtype), highlight=False)
    tokens = prompt(lm, options.tokens + options.following)
    text, following = tokens[:, : options.tokens], tokens[:, options.tokens :]

    def read(policy, chunk):
        lengths = jnp.array([options.tokens], jnp.int32)
        _, cache = kv.prefill(lm.model, text, lengths, policy, reserve=options.following, chunk=chunk)
        return cache, kv.extend(lm.model, cache, following, all_logits=True)[0]

    _, exact = read(kv.FullCache(), None)
    table = Table(title=f"{options.following} tokens after {options.tokens:,}, budget {options.budget}")
    for heading in ("policy", "chunk", "kept entries in common", "KL from the full cache"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name in options.policies.split(","):
        policy, whole = make_policy(name, options.budget), None
        for chunk in (None, *map(int, options.chunks.split(","))):
            with console.status(f"{name}, {chunk or 'at once'}"):
                cache, logits = read(policy, chunk)
                whole = whole or cache
            same, divergence = _common(cache, whole), _divergence(exact, logits)
            table.add_row(name, f"{chunk or 'at once'}", f"{same:.1%}", f"{divergence:.3f}")
    console.print(table)


def _common(cache: kv.CompressedKV, other: kv.CompressedKV) -> float:
    pairs = [pair for heads in zip(cache.kept_positions(0), other.kept_positions(0)) for pair in zip(*heads)]
    return sum(len(np.intersect1d(a, b)) for a, b in pairs) / sum(len(b) for _, b in pairs)


def _divergence(exact: jax.Array, logits: jax.Array) -> float:
    a, b = jax.nn.log_softmax(exact[0]), jax.nn.log_softmax(logits[0])
    return float(jnp.mean(jnp.sum(jnp.exp(a) * (a - b), axis=-1)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chunks", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--following", type=int, default=64)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--chunks", default="512,1024")
    parser.add_argument("--policies", default="snapkv,knorm,streaming")
    return parser.parse_args()


if __name__ == "__main__":
    main()
