"""Draws what six policies keep of one prompt: ``python -m benchmarks.picture``, into ``docs/images/kept.png``."""

import argparse

import jax.numpy as jnp
import numpy as np

import kvec_jax as kv
from benchmarks.common import prompt
from benchmarks.policies import make

_POLICIES = "streaming,knorm,snapkv,kvec,compresskv,laprox"


def main() -> None:
    """Reads the prompt once, and writes the picture."""
    from matplotlib.figure import Figure

    options = _options()
    names = options.policies.split(",")
    lm = kv.load(options.model)
    policies = [make(name, options.budget, options.model) for name in names]
    tokens = prompt(lm, options.tokens)
    _, caches = kv.sweep(lm.model, tokens, jnp.array([options.tokens]), policies)
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots(2, -(-len(names) // 2), squeeze=False).flat
    for axis, name, cache in zip(axes, names, caches):
        axis.imshow(kept(cache, options.tokens), aspect="auto", cmap="Greys", interpolation="nearest")
        axis.set_title(f"{name}: any head keeps {kv.coverage(cache)[0]:.0%}", fontsize=10)
        axis.set(xlabel="token", ylabel="head, first layer on top")
    figure.savefig(options.out, dpi=110)


def kept(cache: kv.CompressedKV, tokens: int) -> np.ndarray:
    """Bool [layers * heads, tokens]: what is kept of the first prompt."""
    heads = [positions for layer in cache.kept_positions(0) for positions in layer]
    mask = np.zeros((len(heads), tokens), bool)
    for row, positions in zip(mask, heads):
        row[positions] = True
    return mask


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--policies", default=_POLICIES)
    parser.add_argument("--out", default="docs/images/kept.png")
    return parser.parse_args()


if __name__ == "__main__":
    main()
