"""What decides whether tiers pay on an accelerator: ``python -m benchmarks.tiers_device``.

Copies from host memory to the device and whether they overlap a program; the round trip of a few numbers to the host;
what a dispatch costs. Everything is a median, on whatever device JAX finds.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import processor


def main() -> None:
    """Prints one table."""
    options = _options()
    device = jax.devices()[0]
    table = Table(title=f"{device.device_kind} ({device.platform}), host {processor()}, JAX {jax.__version__}")
    for heading in ("what", "size", "median", "per second or share"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for megabytes in (1, 16, 64):
        _copies(table, megabytes << 20, options.runs)
    for kilobytes in (4, 16, 64):
        seconds = _round_trip(kilobytes << 10, options.runs)
        table.add_row("a program's numbers to the host", f"{kilobytes} KiB", f"{seconds * 1e6:,.0f} us", "")
    seconds = _dispatch(options.runs)
    table.add_row("dispatch of a small program", "", f"{seconds * 1e6:,.1f} us", f"{1 / seconds:,.0f}")
    Console(width=110).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers_device", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="timed repetitions (default: %(default)s)")
    return parser.parse_args()


def _copies(table: Table, size: int, runs: int) -> None:
    """Host to device alone, a program that takes about as long alone, and both at once."""
    data = np.ones(size, np.uint8)
    x = jnp.ones((512, 512), jnp.bfloat16)
    multiply = jax.jit(lambda x, times: jax.lax.fori_loop(0, times, lambda _, y: (x @ y) * jnp.bfloat16(1e-3), x))

    def copy():
        return jnp.array(data)

    alone = _median(copy, runs)
    times, busy = 1, 0.0
    while busy < alone:
        times *= 2
        busy = _median(functools.partial(multiply, x, times), 3)

    def both():
        result = multiply(x, times)
        return copy(), result

    together = _median(both, runs)
    label = f"{size >> 20} MiB"
    table.add_row("host to device", label, f"{alone * 1e3:.3f} ms", f"{size / alone / 1e9:.1f} GB")
    hidden = (alone + busy - together) / min(alone, busy)
    table.add_row("  with a program of about that time", label, f"{together * 1e3:.3f} ms", f"{hidden:.0%} hidden")


def _round_trip(size: int, runs: int) -> float:
    ids = jnp.zeros(size // 4, jnp.int32)
    program = jax.jit(lambda ids: ids + 1)

    def task():
        result = program(ids)
        result.copy_to_host_async()
        return np.asarray(result)

    return _median(task, runs)


def _dispatch(runs: int) -> float:
    """Seconds from call to call, without waiting for results."""
    program = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(program(jnp.zeros(8)))
    count = 200

    def task():
        y = x
        for _ in range(count):
            y = program(y)
        return y

    return _median(task, runs) / count


def _median(task, runs: int) -> float:
    jax.block_until_ready(task())
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        jax.block_until_ready(task())
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
