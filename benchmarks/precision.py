"""How many entries a policy keeps in bfloat16 that it also keeps in float32: ``python -m benchmarks.precision``.

The model reads one prompt in both, once for all policies; what they keep is compared, over all layers and heads. Beside
it stands what two random choices of the same size would share.
"""

import argparse

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import kvec_jax as kv
from benchmarks.common import machine, prompt
from benchmarks.picture import kept
from benchmarks.policies import make

_OTHERS = "full", "sekv", "tiered"  # these choose no entries


def main() -> None:
    """Prints the machine, then a table with one row per policy."""
    options = _options()
    console = Console(width=100)
    exact, rough = (kv.load(options.model, dtype=dtype) for dtype in ("float32", "bfloat16"))
    console.print(machine(options.model, "float32 and bfloat16"), highlight=False)
    tokens = prompt(exact, options.tokens)
    table = Table(title=f"Entries kept of {options.tokens:,} tokens, budget {options.budget}")
    for heading in ("policy", "kept in both", "by chance"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    names = options.policies or [name for name in kv.policies.names() if name not in _OTHERS]
    policies = [make(name, options.budget, options.model) for name in names]
    with console.status(f"{len(names)} policies, in float32 and bfloat16"):
        masks = [_kept(lm, tokens, policies) for lm in (exact, rough)]
    for name, of_exact, of_rough in zip(names, *masks, strict=True):
        shared = (of_exact & of_rough).sum() / of_exact.sum()
        chance = (of_exact.mean(axis=-1) * of_rough.mean(axis=-1)).sum() * tokens.size / of_exact.sum()
        table.add_row(name, f"{shared:.3f}", f"{chance:.3f}")
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--policies", type=lambda text: text.split(","), help="by default all that there are")
    return parser.parse_args()


def _kept(lm, tokens, policies: list[kv.Policy]) -> np.ndarray:
    """Bool [policies, heads of all layers, tokens]: what each keeps of the prompt."""
    _, caches = kv.sweep(lm.model, tokens, jnp.array([tokens.size], jnp.int32), policies)
    return np.stack([kept(cache, tokens.size) for cache in caches])


if __name__ == "__main__":
    main()
