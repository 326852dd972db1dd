"""SeKV beside eviction with as many bytes on the device: ``python -m benchmarks.sekv --text FILE``.

The context is compressed before the question is known. Of the answers to needles: how many are found, and the mean
log-likelihood of the tokens of the right one; of records in a list: the likelihood alone; of texts that go on: KL from
the full cache, in nats, and how often the most likely token is the same. Bytes are those of the buffers, as a share of
the full cache's; what moves is brought from the host to the device for each new token.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine
from kvec_jax.calibrate.replay import greedy
from kvec_jax.calibrate.settings import Text
from kvec_jax.evals.example import make_prompt
from kvec_jax.evals.metrics import found
from kvec_jax.evals.tasks import make_tasks
from kvec_jax.sekv.losses import divergence

_NEW, _GOLD, _QUESTION = 24, 64, 64
_TASKS = ("needle", "kv", "text")
_greedy = jax.jit(greedy, static_argnums=3)
_POLICIES = ("sekv trained", "sekv untrained", "snapkv", "compresskv", "laprox")


def main() -> None:
    """Prints the machine, and one row per policy and share."""
    options = _options()
    lm = kv.load(options.model, dtype=options.dtype)
    text = Text.files([options.text])
    if options.held_out:
        text = Text(text.text[-int(options.held_out * len(text.text)) :], text.source)
    tasks = make_tasks(options.tasks, lm.tokenizer, text, [options.tokens], options.examples, options.seed)
    prompts = [(task.name, make_prompt(lm.tokenizer, x, options.tokens)) for task in tasks for x in task.examples]
    trials = _trials(options)
    rows = {trial: [] for trial in trials}
    for task, prompt in track(prompts, console=Console(stderr=True)):
        reference = None
        for trial, policy in trials.items():
            seen = _measure(lm, policy, task, prompt, reference, options.tokens)
            reference = seen.pop("logits") if reference is None else reference
            seen.pop("logits", None)
            rows[trial].append(seen)
    console = Console(width=130)
    console.print(machine(options.model, lm.model.dtype), highlight=False)
    console.print(
        f"{options.examples} examples of each task, {options.tokens} tokens, {pathlib.Path(options.text).name}, "
        f"head {options.head}", highlight=False
    )  # fmt: skip
    console.print(_table(rows))


def _trials(options) -> dict[str, object]:
    trials = {"full": kv.FullCache()}
    for share in options.shares:
        for name, policy in (
            ("sekv trained", kv.SeKV(share, head=options.head)),
            ("sekv untrained", kv.SeKV(share)),
            ("snapkv", kv.SnapKV(share)),
            ("compresskv", kv.CompressKV(share, calibration=options.model)),
            ("laprox", kv.LaProx(share)),
        ):
            if name in options.policies and (name != "sekv trained" or options.head is not None):
                trials[f"{name} {share:.0%}"] = policy
    return trials


def _measure(lm, policy, task: str, prompt, reference, tokens: int) -> dict[str, float]:
    """What one prompt shows under a policy; ``logits`` of the right answer's tokens among it."""
    split = prompt.split or len(prompt.tokens)
    context, question = prompt.tokens[:split], prompt.tokens[split:]
    gold = prompt.gold[:_GOLD]
    padded = np.zeros((1, tokens), np.int32)
    padded[0, :split] = context
    logits, cache = kv.prefill(lm.model, padded, [split], policy, reserve=_QUESTION + _GOLD + _NEW)
    first = logits
    if question:
        row = np.zeros((1, _QUESTION), np.int32)
        row[0, : len(question)] = question
        first, cache = kv.extend(lm.model, cache, row, [len(question)])
    before = cache
    row = np.zeros((1, _GOLD), np.int32)
    row[0, : len(gold)] = gold
    later, after = kv.extend(lm.model, cache, row, [len(gold)], all_logits=True)
    logits = jnp.concatenate([first[:, None], later[:, : len(gold) - 1]], axis=1)[0]
    likely = jax.nn.log_softmax(logits)[jnp.arange(len(gold)), jnp.array(gold)]
    seen = {
        "logits": logits,
        "device": cache.pool_nbytes / _full(lm, tokens),
        "host": cache.host_nbytes / _full(lm, tokens),
    }
    if cache.beyond is not None:
        moved = after.beyond.moved_nbytes - before.beyond.moved_nbytes
        seen["moved"] = float(moved[0]) / len(gold)
    seen[f"{task} likelihood"] = float(jnp.mean(likely))
    if task == "needle":
        made = _greedy(lm.model, before, first, _NEW)
        seen["needle found"] = found(lm.tokenizer.decode(np.asarray(made[0]).tolist()), prompt.example.answers)
    if task == "text":
        seen["text kl"] = 0.0 if reference is None else float(divergence(reference, logits))
        best = logits if reference is None else reference
        seen["text same"] = float(jnp.mean(jnp.argmax(best, -1) == jnp.argmax(logits, -1)))
    return seen


def _full(lm, tokens: int) -> int:
    return lm.config.kv_bytes(tokens, lm.model.dtype.itemsize)


_COLUMNS = {
    "device": ("on device", "{:.1%}"),
    "host": ("on host", "{:.1%}"),
    "moved": ("kB moved a token", "{:.0f}"),
    "needle found": ("needles found", "{:.0%}"),
    "needle likelihood": ("needles, ln p", "{:.2f}"),
    "kv likelihood": ("records, ln p", "{:.2f}"),
    "text kl": ("text, KL", "{:.3f}"),
    "text same": ("text, same", "{:.1%}"),
}


def _table(rows: dict[str, list[dict]]) -> Table:
    table = Table("policy", *(heading for heading, _ in _COLUMNS.values()))
    for trial, seen in rows.items():
        cells = []
        for key, (_, form) in _COLUMNS.items():
            values = [row[key] for row in seen if key in row]
            value = np.mean(values) / (1e3 if key == "moved" else 1) if values else None
            cells.append("" if value is None else form.format(value))
        table.add_row(trial, *cells)
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--head", help="a trained head: a file, or the name of a model whose head is shipped")
    parser.add_argument("--text", required=True, help="what needles are hidden in and what goes on, in UTF-8")
    parser.add_argument("--held-out", type=float, default=0.1, help="use this last share of the text alone")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--shares", type=lambda t: [float(x) for x in t.split(",")], default=[0.05, 0.1, 0.2])
    parser.add_argument("--tasks", type=lambda t: t.split(","), default=_TASKS)
    parser.add_argument("--policies", type=lambda t: t.split(","), default=_POLICIES)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
