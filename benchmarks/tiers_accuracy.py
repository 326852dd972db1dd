"""Answers over tiers beside the full cache's: ``python -m benchmarks.tiers_accuracy``.

Things hidden in Python's language reference or a file's text: a needle; ``lines``, which fill the prompt with numbered
lines of which one is asked for; ``few_lines``, 24 of them with text between. A batch of prompts is read once; what was
read is then put on tiers for every budget, with the same bytes on device and host. The budget 1 with everything on the
device stands for the full cache, whose attention it is. *Found*: the greedy answer has the right one. *ln p*: mean
log-likelihood of the right answer's tokens. *Same*: how often the most likely token along the right answer is the full
cache's. With ``--log`` a run that was interrupted goes on.
"""

import argparse
import dataclasses
import random
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine
from kvec_jax.calibrate.replay import pad
from kvec_jax.calibrate.settings import Text
from kvec_jax.evals import tasks
from kvec_jax.evals.example import Prompt, make_prompt
from kvec_jax.evals.metrics import score
from kvec_jax.evals.room import Room
from kvec_jax.records import Records
from kvec_jax.running import cut_at_end
from kvec_jax.tiers.reading import Reading

_MOST = 64  # tokens of an answer, given or written
_LINES = 24


def few_lines(room: Room, depth: float, rng: random.Random) -> dict:
    """Some lines with numbers, evenly among the text; the number of one is asked for."""
    values = rng.sample(range(10000, 100000), _LINES)
    asked = round(depth * (_LINES - 1))
    question = f"What number stands in line {asked + 1}?"
    sentences = [f"Line {i}: the number is <{value}>." for i, value in enumerate(values, 1)]
    context = room.bury(sentences, [(i + 0.5) / _LINES for i in range(_LINES)], question, rng)
    return dict(context=context, question=question, answers=(str(values[asked]),), max_new_tokens=16)


def main() -> None:
    """Prints the machine, and one row per task and budget."""
    options = _options()
    lm = kv.load(options.model, dtype=options.dtype)
    text = Text.files([options.text]) if options.text else Text.reference()
    tasks.MADE["few_lines"] = few_lines
    made = tasks.make_tasks(options.tasks, lm.tokenizer, text, [options.tokens], options.examples, options.seed)
    policies = _policies(options, lm)
    prompts = {
        f"{task.name}/{x.name}": make_prompt(lm.tokenizer, x, options.tokens) for task in made for x in task.examples
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Records(options.log or f"{folder}/log", _header(options, text))
        for task in options.tasks:
            mine = {name: prompt for name, prompt in prompts.items() if name.startswith(f"{task}/")}
            for first in range(0, len(mine), options.batch):
                _run(lm, dict(list(mine.items())[first : first + options.batch]), policies, options.tokens, log)
        console = Console(width=110, highlight=False)
        console.print(machine(options.model, lm.model.dtype))
        console.print(
            f"{options.tokens:,} tokens, {options.examples} examples of each task, {options.batch} at a time, "
            f"{text.source}; {options.device:.4g} of the cache on the device, {options.host:.4g} in host memory, all "
            "on disk"
        )
        console.print(_table(options.tasks, policies, log))


def _header(options, text: Text) -> dict:
    """What results depend on."""
    names = ("model", "dtype", "tokens", "examples", "batch", "budgets", "index", "device", "host", "seed")
    return {name: getattr(options, name) for name in names} | dict(text=text.describe())


def _policies(options, lm) -> dict[str, kv.Tiered]:
    """The stand-in for the full cache, then one for each budget."""
    cache = lm.config.kv_bytes(options.tokens, lm.model.dtype.itemsize) * options.batch
    spread = dict(device_bytes=int(cache * options.device), host_bytes=int(cache * options.host), disk=options.disk)
    full = kv.Tiered(budget=1.0, index=options.index)
    return {"full": full} | {
        f"{budget:.2%}": dataclasses.replace(full, budget=budget, **spread) for budget in options.budgets
    }


def _run(lm, prompts: dict[str, Prompt], policies: dict[str, kv.Tiered], padded: int, log: Records) -> None:
    """Reads a batch and measures it under all policies, unless that is done."""
    if all(name in log for name in prompts):
        return
    began = time.perf_counter()
    tokens, lengths = pad([prompt.tokens for prompt in prompts.values()], padded)
    reading = Reading.of(lm.model, jnp.asarray(tokens), jnp.asarray(lengths), policies["full"], _MOST)
    print(f"{', '.join(prompts)}: read in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    measured, reference = {}, None
    for budget, policy in policies.items():
        began = time.perf_counter()
        measured[budget], best = _measure(lm, reading, list(prompts.values()), policy, reference)
        reference = best if reference is None else reference
        print(f"  {budget}: {time.perf_counter() - began:.0f} s, {measured[budget]}", file=sys.stderr)
    for row, name in enumerate(prompts):
        log.add(name, {budget: rows[row] for budget, rows in measured.items()})


def _measure(
    lm, reading: Reading, prompts: list[Prompt], policy: kv.Tiered, reference
) -> tuple[list[dict], np.ndarray]:
    """What each prompt shows under a policy, and the most likely tokens int [B, n] along the right answers."""
    ends = lm.config.eos_token_ids
    new = prompts[0].example.max_new_tokens
    with reading.decoder(policy) as decoder:
        state = decoder.begin(reading.logits, kv.Greedy(), jax.random.key(0), new, ends)
        state = decoder.advance(state, kv.Greedy(), jax.random.key(0), new, ends)
        hits = 1 - decoder.recorder.missed / max(decoder.recorder.chosen, 1)
    gold, lengths = pad([prompt.gold for prompt in prompts], max(len(prompt.gold) for prompt in prompts))
    with reading.decoder(policy) as decoder:
        logits = jnp.stack([reading.logits, *decoder.follow(gold[:, :-1], lengths - 1)], axis=1)
    logits = np.asarray(jax.nn.log_softmax(logits))
    best = logits.argmax(axis=-1)
    results = []
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        there = np.arange(length)
        answer = lm.tokenizer.decode(cut_at_end(state.tokens[row, : state.count].tolist(), ends))
        results.append(
            dict(
                found=float(score(prompt.example, answer)),
                likelihood=float(logits[row, there, gold[row, :length]].mean()),
                same=float(np.mean((best if reference is None else reference)[row, :length] == best[row, :length])),
                hits=hits,
                answer=answer,
            )
        )
    return results, best


def _table(names: list[str], policies: dict[str, kv.Tiered], log: Records) -> Table:
    table = Table("task", "budget", "found", "ln p", "same", "on device already")
    for task in names:
        for budget in policies:
            seen = [log[name][budget] for name in log if name.startswith(f"{task}/")]
            found, likelihood, same, hits = (np.mean([x[key] for x in seen]) for key in _SHOWN)
            row = f"{found:.0%} of {len(seen)}", f"{likelihood:.3f}", f"{same:.1%}", f"{hits:.1%}"
            table.add_row(task, budget, *row)
    return table


_SHOWN = ("found", "likelihood", "same", "hits")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--tasks", type=lambda t: t.split(","), default=["needle", "few_lines"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--examples", type=int, default=6, help="of each task (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="prompts run together (default: %(default)s)")
    parser.add_argument("--budgets", type=lambda t: [float(x) for x in t.split(",")], default=[1 / 64, 1 / 16])
    parser.add_argument("--index", choices=["mean", "clusters"], default="mean")
    parser.add_argument("--device", type=float, default=1 / 16, help="share of the cache (default: 1/16)")
    parser.add_argument("--host", type=float, default=1 / 4, help="share of the cache (default: 1/4)")
    parser.add_argument("--disk", default="/var/tmp", help="folder (default: %(default)s)")
    parser.add_argument("--text", help="file to hide things in (default: Python's reference)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", metavar="FILE", help="results as they come; with the same options the run goes on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
