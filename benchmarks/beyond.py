"""Texts beyond the model's context: ``python -m benchmarks.beyond``.

A text is read in chunks, and a policy keeps its budget after each. Shown is the mean log-likelihood of the tokens that
follow, with kept entries at their own positions and turned to the first ones (``rerotate``); positions beyond what the
model was made for are allowed here, for comparison. Beside them: the full cache, as far as the context reaches, and a
prompt of the last tokens alone, as many as budget and chunk are together.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine, prompt
from kvec_jax.policies.options import make_policy


def main() -> None:
    """Prints the machine, then a table with one row per length."""
    options = _options()
    console = Console(width=130)
    lm = kv.load(options.model, dtype=options.dtype)
    console.print(machine(options.model, lm.model.dtype), highlight=False)
    context = lm.config.max_position_embeddings
    lengths = [int(length) for length in options.lengths.split(",")]
    longest = max(lengths) + options.following
    text = prompt(lm, longest)
    for module in (lm.model, lm.model.layers):
        module.config = dataclasses.replace(lm.config, max_position_embeddings=max(longest, context))
    readings = _readings(options, context)
    sizes = f"context {context:,}; budget {options.budget}, chunk {options.chunk}"
    table = Table(title=f"ln p of {options.following} tokens; {sizes}")
    for heading in ("tokens before", *readings):
        table.add_column(heading, justify="right")
    for length in lengths:
        with console.status(f"{length:,} tokens"):
            found = [read(lm.model, text, length) for read in readings.values()]
        table.add_row(f"{length:,}", *("" if value is None else f"{value:.3f}" for value in found))
    console.print(table)


def _readings(options: argparse.Namespace, context: int) -> dict:
    """The columns: a heading, and what gives the mean log-likelihood after so many tokens, or nothing."""

    def following(model, text, start, length, policy, **settings):
        tokens = text[:, start:length]
        count, new = jnp.array([length - start]), text[:, length : length + options.following]
        logits, cache = kv.prefill(model, tokens, count, policy, reserve=options.following, **settings)
        more, _ = kv.extend(model, cache, new, all_logits=True)
        said = jax.nn.log_softmax(jnp.concatenate([logits[:, None], more[:, :-1]], axis=1))
        return float(jnp.mean(jnp.take_along_axis(said, new[..., None], axis=-1)))

    def whole(model, text, length):
        fits = length + options.following <= context
        return following(model, text, 0, length, kv.FullCache()) if fits else None

    def newest(model, text, length):
        start = max(length - options.budget - options.chunk, 0)
        return following(model, text, start, length, kv.FullCache())

    def compressed(name, rerotate):
        settings = dict(chunk=options.chunk, rerotate=rerotate)
        policy = make_policy(name, options.budget)
        return lambda model, text, length: following(model, text, 0, length, policy, **settings)

    readings = {"full cache": whole, "the last alone": newest}
    for name in options.policies.split(","):
        readings |= {name: compressed(name, False), f"{name}, rerotated": compressed(name, True)}
    return readings


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beyond", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", default="2048,4096,7680,12288,24576", metavar="LIST")
    parser.add_argument("--following", type=int, default=512)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--policies", default="streaming,snapkv")
    return parser.parse_args()


if __name__ == "__main__":
    main()
