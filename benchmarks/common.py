"""What the benchmarks share: the machine, a prompt of real text, and times taken in turn."""

import os
import pathlib
import platform
import statistics
import time

import jax
import jax.numpy as jnp

from kvec_jax.demo import reference_text


def machine(model: str, dtype, runs: int | None = None) -> str:
    """Processor, versions, model and number of timed runs, in two lines."""
    device = jax.devices()[0]
    timing = f", medians of {runs}" if runs else ""
    return (
        f"{processor()}, {os.cpu_count()} cores; JAX {jax.__version__} on {device.platform} ({device.device_kind}); "
        f"Python {platform.python_version()}\n{model}, {dtype}{timing}"
    )


def processor() -> str:
    """Name of the processor."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def prompt(lm, length: int) -> jax.Array:
    """Exactly ``length`` tokens of the reference, int32 [1, length]."""
    # A token is hardly ever longer than 16 characters, and encoding all of the text takes long.
    ids = lm.tokenizer.encode(reference_text()[: 16 * length])
    return jnp.asarray([(ids * (length // len(ids) + 1))[:length]], jnp.int32)


def medians(tasks: dict, runs: int, prepare=None) -> dict[str, float]:
    """Median seconds of each task, in turn, after a warm-up; ``prepare(name)`` makes its argument, untimed."""
    seconds = {name: [] for name in tasks}
    for _ in range(runs + 1):
        for name, task in tasks.items():
            arguments = () if prepare is None else (prepare(name),)
            start = time.perf_counter()
            task(*arguments)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}
