"""``kvec bench tiers`` and ``kvec calibrate --tiers``."""

import argparse
import pathlib

from kvec_jax.policies.options import parse_budget


def add_bench(commands) -> None:
    """Adds ``bench`` to the command line's subparsers."""
    bench = commands.add_parser("bench", help="measure on this machine")
    subjects = bench.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    tiers = subjects.add_parser(
        "tiers",
        help="the cache over device, host memory and disk: what overlap and eviction are worth",
        description="Reads a prompt, spreads its cache over tiers and writes tokens: with and without overlap, with "
        "lookahead and LRU, with a latency added to every fetch. Prints a table of stages and a timeline.",
    )
    tiers.add_argument("--model", default="smollm2-135m", metavar="MODEL", help="(default: %(default)s)")
    tiers.add_argument("--dtype", choices=["float32", "bfloat16"], help="of weights and cache (default: the model's)")
    tiers.add_argument("--tokens", type=int, default=2048, metavar="N", help="of each prompt (default: %(default)s)")
    tiers.add_argument("--batch", type=int, default=1, metavar="N", help="prompts (default: %(default)s)")
    tiers.add_argument("--new", type=int, default=32, metavar="N", help="tokens to write (default: %(default)s)")
    tiers.add_argument(
        "--budget",
        type=parse_budget,
        default=0.0625,
        metavar="N",
        help="tokens of a head that a step attends to, or a share of them (default: %(default)s)",
    )
    tiers.add_argument("--device", type=float, default=1 / 16, metavar="SHARE", help="of the cache (default: 1/16)")
    tiers.add_argument("--host", type=float, default=1 / 4, metavar="SHARE", help="of the cache (default: 1/4)")
    tiers.add_argument("--disk", metavar="FOLDER", help="for the rest (default: no disk, the rest in memory)")
    tiers.add_argument(
        "--latency", type=float, nargs="+", default=[0, 1, 5], metavar="MS", help="added to fetches (default: 0 1 5)"
    )
    tiers.add_argument("--runs", type=int, default=3, metavar="N", help="repetitions (default: %(default)s)")
    tiers.set_defaults(run=_bench)


def calibrate(arguments: argparse.Namespace) -> None:
    """``kvec calibrate --tiers``: 64 steps after each of two prompts of 2,048 tokens; with ``--quick`` little."""
    from rich.console import Console

    from kvec_jax.progress import Bar
    from kvec_jax.tiers import calibrate

    text = None
    if arguments.text:
        text = "\n\n".join(pathlib.Path(name).read_text(encoding="utf-8") for name in arguments.text)
    console = Console(stderr=True, highlight=False)
    with Bar(console) as bar:
        made = calibrate.run(
            arguments.model,
            arguments.out,
            tokens=256 if arguments.quick else 2048,
            prompts=1 if arguments.quick else 2,
            steps=8 if arguments.quick else 64,
            budget=0.0625,
            text=text,
            dtype=arguments.dtype,
            progress=bar,
        )
    least, most = (sum(sum(head[i] for head in layer) for layer in made.misses) for i in (-1, 0))
    console.print(
        f"{arguments.out}: {most:,.0f} blocks fetched per step with windows of x{made.factors[0]:g}, "
        f"{least:,.0f} with x{made.factors[-1]:g}",
        soft_wrap=True,
    )


def _bench(arguments: argparse.Namespace) -> None:
    from kvec_jax.arguments import check_count
    from kvec_jax.tiers import bench

    for name, low in (("tokens", 1), ("batch", 1), ("new", 2), ("runs", 1)):
        check_count(f"--{name}", getattr(arguments, name), low)
    for name in ("device", "host"):
        if not 0 < getattr(arguments, name) <= 1:
            raise ValueError(f"--{name}: expected a share in (0, 1], got {getattr(arguments, name)}")
    if min(arguments.latency) < 0:
        raise ValueError(f"--latency: expected milliseconds, 0 or more, got {min(arguments.latency):g}")
    bench.run(
        arguments.model,
        tokens=arguments.tokens,
        batch=arguments.batch,
        new=arguments.new,
        budget=arguments.budget,
        device_share=arguments.device,
        host_share=arguments.host,
        disk=arguments.disk,
        latencies=[milliseconds / 1e3 for milliseconds in arguments.latency],
        runs=arguments.runs,
        dtype=arguments.dtype,
    )
