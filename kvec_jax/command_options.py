"""Arguments that several commands take, and what they mean."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from kvec_jax.arguments import check_count
from kvec_jax.policies.options import DEFAULT_BUDGET, make_policy, parse_budget, parse_setting

DEFAULT_MODEL = "smollm2-135m"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model`` and ``--dtype``."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a known name, a hub id, a folder of safetensors or a .gguf file (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of weights and cache (default: the model's)")


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """What goes with a ``--policy``; ``policy_of`` reads it."""
    parser.add_argument(
        "--budget",
        type=parse_budget,
        metavar="N",
        help=f"what to keep: tokens per head, such as 256, or a share of the prompt, such as 0.25 "
        f"(default: {DEFAULT_BUDGET}, for policies that have one)",
    )
    parser.add_argument(
        "--set",
        type=parse_setting,
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="a further setting of the policy, such as window=16; may be repeated",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="of kvec calibrate, for compresskv (default: the one shipped for MODEL)"
    )
    parser.add_argument("--chunk", type=int, metavar="N", help="read so many tokens at a time (default: all at once)")
    parser.add_argument(
        "--rerotate", action="store_true", help="with --chunk: read texts longer than the model's context"
    )
    parser.add_argument("--cache-dtype", choices=["int8", "int4"], help="how kept entries are stored")


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """How to generate; ``sampler_of`` reads a part of it."""
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: most likely")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the most likely, together P")
    parser.add_argument("--min-p", type=float, metavar="P", help="sample from those at least P times the best")
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="P", help="such as 1.1: makes what was written already less likely"
    )
    parser.add_argument(
        "--repetition-window", type=int, metavar="N", help="such as 256: for the last N tokens only (default: for all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: %(default)s)")
    parser.add_argument("--stream", action="store_true", help="write the text as it comes")


def add_settings(parser: argparse.ArgumentParser, settings: dict[str, tuple[Callable, str, str]]) -> None:
    """Options for settings of something else, which has their defaults: kind, metavar and help of each.

    ``settings_of`` gives those that were used.
    """
    for name, (kind, metavar, words) in settings.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=words)
    parser.set_defaults(settings_names=list(settings))


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by name."""
    given = {name: getattr(arguments, name) for name in arguments.settings_names}
    return {name: value for name, value in given.items() if value is not None}


def list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    """A kind of option: several of another kind, with commas between them.

    >>> list_of(int)("1000,2000")
    (1000, 2000)
    """

    def parse(text: str) -> tuple:
        try:
            return tuple(kind(part.strip()) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected numbers such as 256,512, got {text!r}") from None

    return parse


def policy_of(arguments: argparse.Namespace):
    """The policy that was asked for."""
    settings = arguments.settings
    if arguments.calibration is not None:
        settings = [*settings, ("calibration", arguments.calibration)]
    return make_policy(arguments.policy, arguments.budget, settings, model=arguments.model)


def sampler_of(arguments: argparse.Namespace):
    """The sampler that was asked for, to write at least one token."""
    import kvec_jax as kv

    check_count("--max-new-tokens", arguments.max_new_tokens, 1)
    limits = {name: getattr(arguments, name) for name in ("top_k", "top_p", "min_p")}
    limits = {name: value for name, value in limits.items() if value is not None}
    penalty = dict(repetition_penalty=arguments.repetition_penalty, repetition_window=arguments.repetition_window)
    if arguments.temperature:
        return kv.Sample(temperature=arguments.temperature, **penalty, **limits)
    if limits:
        flag = "--" + next(iter(limits)).replace("_", "-")
        raise ValueError(f"{flag} needs a --temperature above 0")
    return kv.Greedy(**penalty)


def read_text(path: str) -> str:
    """The text in a file; a ``ValueError`` if it isn't text."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected text in UTF-8") from None


def summary(stats, read: str | None = None) -> str:
    """What a generation cost, in one line; ``read`` says what was read, if not all tokens of the prompt."""
    share = stats.cache_bytes / stats.full_cache_bytes
    compiled = f" (compiled in {stats.compile_seconds:.1f} s)" if stats.compile_seconds >= 0.1 else ""
    return (
        f"{read or f'{stats.prompt_tokens:,} tokens'} read in {stats.prefill_seconds:.1f} s{compiled}, "
        f"{stats.new_tokens:,} written at {stats.tokens_per_second:.1f} a second; "
        f"cache {stats.cache_bytes / 1e6:,.1f} MB, {share:.1%} of the full cache's "
        f"{stats.full_cache_bytes / 1e6:,.1f} MB"
    )


def write(piece: str) -> None:
    """Writes a piece of text at once."""
    print(piece, end="", flush=True)
