"""Answers over tiers beside the full cache's: ``python -m benchmarks.tiers_accuracy``.

Needles and lines (one of many numbered lines is asked for), hidden in Python's language reference or a file's text. A
prompt is read once; what was read is then put on tiers for every budget, with the same bytes on device and host. The
budget 1 with everything on the device stands for the full cache, whose attention it is. *Found*: the greedy answer has
the right one. *ln p*: mean log-likelihood of the right answer's tokens. *Same*: how often the most likely token along
the right answer is the full cache's.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine
from kvec_jax.calibrate.settings import Text
from kvec_jax.evals.example import Prompt, make_prompt
from kvec_jax.evals.metrics import score
from kvec_jax.evals.tasks import make_tasks
from kvec_jax.running import cut_at_end
from kvec_jax.tiers import bench
from kvec_jax.tiers.decoder import TieredDecoder

_MOST = 64  # tokens of an answer, given or written


def main() -> None:
    """Prints the machine, and one row per task and budget."""
    options = _options()
    lm = kv.load(options.model, dtype=options.dtype)
    text = Text.files([options.text]) if options.text else Text.reference()
    tasks = make_tasks(options.tasks, lm.tokenizer, text, [options.tokens], options.examples, options.seed)
    full, *tiered = policies = _policies(options, lm)
    rows = {key: [] for key in itertools.product(options.tasks, policies)}
    prompts = [(task.name, make_prompt(lm.tokenizer, x, options.tokens)) for task in tasks for x in task.examples]
    for task, prompt in track(prompts, console=Console(stderr=True)):
        read = _read(lm, prompt, full, options.tokens)
        reference = _measure(lm, read, prompt, full, None)
        rows[task, full].append(reference)
        for policy in tiered:
            rows[task, policy].append(_measure(lm, read, prompt, policy, reference["best"]))
    console = Console(width=110, highlight=False)
    console.print(machine(options.model, lm.model.dtype))
    console.print(
        f"{options.tokens:,} tokens, {options.examples} examples of each task, {text.source}; "
        f"{options.device:.4g} of the cache on the device, {options.host:.4g} in host memory, all on disk"
    )
    console.print(_table(rows))


def _policies(options, lm) -> list[kv.Tiered]:
    """The stand-in for the full cache, then one for each budget."""
    cache = lm.config.kv_bytes(options.tokens, lm.model.dtype.itemsize)
    spread = dict(
        device_bytes=int(cache * options.device), host_bytes=int(cache * options.host), disk=options.disk,
        index=options.index,
    )  # fmt: skip
    full = kv.Tiered(budget=1.0, index=options.index)
    return [full, *(kv.Tiered(budget=budget, **spread) for budget in options.budgets)]


def _read(lm, prompt: Prompt, policy: kv.Tiered, padded: int) -> bench.Prompt:
    tokens = np.zeros((1, padded), np.int32)
    tokens[0, : len(prompt.tokens)] = prompt.tokens
    lengths = jnp.array([len(prompt.tokens)])
    return bench.read(lm.model, jnp.asarray(tokens), lengths, policy, _MOST)


def _measure(lm, read: bench.Prompt, prompt: Prompt, policy: kv.Tiered, reference) -> dict:
    """What one prompt shows under a policy; ``best``: the most likely tokens along the right answer."""
    ends = lm.config.eos_token_ids
    new = prompt.example.max_new_tokens
    with TieredDecoder(lm.model, policy, read.lengths, read.rows, _MOST) as decoder:
        decoder.fill(read.layers)
        state = decoder.begin(read.logits, kv.Greedy(), jax.random.key(0), new, ends)
        state = decoder.advance(state, kv.Greedy(), jax.random.key(0), new, ends)
        hits = 1 - decoder.recorder.missed / max(decoder.recorder.chosen, 1)
    logits = [read.logits[0]]
    with TieredDecoder(lm.model, policy, read.lengths, read.rows, _MOST) as decoder:
        decoder.fill(read.layers)
        for token in prompt.gold[:-1]:
            (hidden,) = decoder.step(np.array([token], np.int32), np.array([False]))
            logits.append(lm.model.unembed(hidden)[0])
    logits = jax.nn.log_softmax(jnp.stack(logits))
    best = np.asarray(jnp.argmax(logits, axis=-1))
    answer = lm.tokenizer.decode(cut_at_end(state.tokens[0, : state.count].tolist(), ends))
    return dict(
        best=best,
        found=score(prompt.example, answer),
        likelihood=float(logits[jnp.arange(len(best)), jnp.array(prompt.gold)].mean()),
        same=float(np.mean(best == (best if reference is None else reference))),
        hits=hits,
    )


def _table(rows: dict) -> Table:
    table = Table("task", "budget", "found", "ln p", "same", "on device already")
    for (task, policy), seen in rows.items():
        found, likelihood, same, hits = (np.mean([x[key] for x in seen]) for key in _SHOWN)
        budget = "full" if policy.budget == 1.0 else f"{policy.budget:.2%}"
        table.add_row(task, budget, f"{found:.0%} of {len(seen)}", f"{likelihood:.3f}", f"{same:.1%}", f"{hits:.1%}")
    return table


_SHOWN = ("found", "likelihood", "same", "hits")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--tasks", type=lambda t: t.split(","), default=["needle", "lines"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--examples", type=int, default=6, help="of each task (default: %(default)s)")
    parser.add_argument("--budgets", type=lambda t: [float(x) for x in t.split(",")], default=[1 / 64, 1 / 16])
    parser.add_argument("--index", choices=["mean", "clusters"], default="mean")
    parser.add_argument("--device", type=float, default=1 / 16, help="share of the cache (default: 1/16)")
    parser.add_argument("--host", type=float, default=1 / 4, help="share of the cache (default: 1/4)")
    parser.add_argument("--disk", default="/var/tmp", help="folder (default: %(default)s)")
    parser.add_argument("--text", help="file to hide things in (default: Python's reference)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
