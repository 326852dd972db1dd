"""``kvec calibrate``: the calibration with a progress bar, and words about what came of it."""

import os

from kvec_jax.calibrate.run import calibrate
from kvec_jax.calibrate.settings import Settings, Text
from kvec_jax.progress import Bar
from kvec_jax.shipped import known_name


def run(model: str, out: str | os.PathLike, settings: Settings, text: Text, *, dtype: str | None = None) -> None:
    """Loads a model, calibrates it and says what was found.

    Args:
        model: What ``kvec_jax.load`` takes.
        out: File to write.
        settings: How much is measured.
        text: Where prompts are cut from.
        dtype: Of weights and cache.
    """
    from rich.console import Console

    import kvec_jax as kv

    console = Console(stderr=True, highlight=False)
    console.print(f"Loading {model}", markup=False)
    lm = kv.load(model, dtype=dtype)
    try:
        with Bar(console) as bar:
            made = calibrate(lm, out, settings, text, name=known_name(model) or lm.name, progress=bar)
    except KeyboardInterrupt:
        console.print(f"Interrupted. The same command goes on from {os.fspath(out)}.partial.", markup=False)
        raise
    right, asked = made.provenance["right"], made.provenance["questions"]
    console.print(f"{out}: {right} of {asked} questions answered; heads and weights of {len(made.heads)} layers")
