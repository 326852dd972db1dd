"""The command line ``kvec``; commands with a file of their own are added from there.

Whatever the user can put right (a path, a name, a number) ends as one line on stderr and exit status 2. Heavy imports
happen inside the functions that need them, so that ``kvec --help`` answers quickly.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence

from kvec_jax.command_options import (
    add_answer_arguments,
    add_model_arguments,
    add_policy_arguments,
    add_settings,
    list_of,
    policy_of,
    read_text,
    sampler_of,
    settings_of,
    summary,
    write,
)
from kvec_jax.errors import KvecError
from kvec_jax.policies.options import DEFAULT_BUDGET, parse_budget


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: that of the process) and returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (KvecError, ValueError, OSError, ImportError) as error:
        print(f"kvec {arguments.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Complains in one line, without the usage that argparse prints before it."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    from kvec_jax import __version__, context_commands
    from kvec_jax.evals import command as evals
    from kvec_jax.sekv import command as sekv
    from kvec_jax.tiers import command as tiers

    parser = _Parser(prog="kvec", description="Key-value cache compression for long-context language models.")
    parser.add_argument("--version", action="version", version=f"kvec_jax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_generate(commands)
    context_commands.add_compress(commands)
    context_commands.add_ask(commands)
    _add_calibrate(commands)
    evals.add_eval(commands)
    evals.add_report(commands)
    tiers.add_bench(commands)
    sekv.add_spans(commands)
    sekv.add_train_zoom(commands)
    models = commands.add_parser("models", help="list the models known by name, or show one")
    models.set_defaults(run=_models)
    actions = models.add_subparsers(dest="action", metavar="show MODEL")
    show = actions.add_parser("show", help="layers, heads, and bytes of the cache before and after compression")
    show.add_argument("model", help="a known name, a hub id, a folder of safetensors or a .gguf file")
    show.add_argument("--budget", type=int, default=DEFAULT_BUDGET, metavar="N", help="tokens per head (%(default)s)")
    show.set_defaults(run=_show_model)
    return parser


def _add_demo(commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="hide facts in a long text, shrink the cache, ask for them",
        description="Hides a fact at several depths of a long text and asks for it, with the full cache and with "
        "compressed ones. The question is part of the prompt when the cache is compressed.",
    )
    add_model_arguments(demo)
    demo.add_argument("--tokens", type=int, default=2000, metavar="N", help="length of the text (default: %(default)s)")
    demo.add_argument("--depths", type=int, default=4, metavar="N", help="places to hide at (default: %(default)s)")
    demo.add_argument(
        "--budgets",
        type=list_of(parse_budget),
        default="64,128,256",
        metavar="LIST",
        help="budgets of the compressed caches (default: %(default)s)",
    )
    demo.add_argument(
        "--secret",
        choices=["word", "number"],
        default="word",
        help="what the fact tells; every digit of a number can get lost by itself (default: %(default)s)",
    )
    demo.set_defaults(run=_demo)


def _add_generate(commands) -> None:
    generate = commands.add_parser(
        "generate",
        help="answer a prompt from a compressed cache",
        description="Writes the answer to standard output and what the cache cost to standard error.",
    )
    generate.add_argument("prompt", help="what to ask; '-' reads it from standard input")
    generate.add_argument("--file", metavar="PATH", help="a long text that is put before the prompt")
    add_model_arguments(generate)
    generate.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    generate.add_argument(
        "--policy", default="full", metavar="NAME", help="such as streaming or snapkv (default: full)"
    )
    add_policy_arguments(generate)
    generate.add_argument(
        "--tail", type=int, metavar="N", help="hold so many new tokens, then choose again (default: all)"
    )
    add_answer_arguments(generate)
    generate.add_argument(
        "--implementation",
        choices=["xla", "pallas_tpu", "pallas_gpu"],
        help="how operations are carried out (default: the platform's kernels where they can, XLA otherwise)",
    )
    generate.set_defaults(run=_generate)


def _add_calibrate(commands) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure what the policy compresskv must know of a model",
        description="Hides facts in texts, asks for them and finds the heads that look at them; then measures what "
        "eviction does to each layer. Takes minutes. When it is interrupted, the same command goes on.",
    )
    calibrate.add_argument("model", metavar="MODEL", help="a known name, a hub id, a folder or a .gguf file")
    calibrate.add_argument("--out", required=True, metavar="FILE", help="what to write")
    calibrate.add_argument("--dtype", choices=["float32", "bfloat16"], help="of weights and cache")
    calibrate.add_argument("--text", nargs="+", metavar="FILE", help="texts to use (default: Python's reference)")
    calibrate.add_argument("--quick", action="store_true", help="little of everything, for a try")
    calibrate.add_argument(
        "--tiers", action="store_true", help="measure instead how the policy Tiered should divide the device"
    )
    settings = {
        "episodes": (int, "N", "right answers to find heads by (default: 100)"),
        "lengths": (list_of(int), "LIST", "of the texts, in tokens (default: 256,384,512)"),
        "layer_texts": (int, "N", "to measure layers with, four prompts each (default: 6)"),
        "seed": (int, "N", "of what is hidden where (default: 0)"),
    }
    add_settings(calibrate, settings)
    calibrate.set_defaults(run=_calibrate)


def _demo(arguments: argparse.Namespace) -> None:
    from kvec_jax import demo

    demo.run(
        arguments.model,
        dtype=arguments.dtype,
        tokens=arguments.tokens,
        depths=arguments.depths,
        budgets=arguments.budgets,
        secret=arguments.secret,
    )


def _calibrate(arguments: argparse.Namespace) -> None:
    given = settings_of(arguments)
    if arguments.tiers:
        from kvec_jax.tiers import command as tiers

        if given:
            raise ValueError(f"--{next(iter(given)).replace('_', '-')} doesn't go with --tiers")
        return tiers.calibrate(arguments)
    from kvec_jax.calibrate import command
    from kvec_jax.calibrate.settings import Settings, Text

    settings = dataclasses.replace(Settings.quick() if arguments.quick else Settings(), **given)
    text = Text.files(arguments.text) if arguments.text else Text.reference()
    command.run(arguments.model, arguments.out, settings, text, dtype=arguments.dtype)


def _generate(arguments: argparse.Namespace) -> None:
    # What can be wrong is looked at before the model is loaded.
    policy = policy_of(arguments)
    sampler = sampler_of(arguments)
    prompt = _prompt(arguments)

    import jax

    import kvec_jax as kv

    model = kv.load(arguments.model, dtype=arguments.dtype)
    output = model.generate(
        prompt if arguments.raw else [{"role": "user", "content": prompt}],
        policy=policy,
        max_new_tokens=arguments.max_new_tokens,
        sampler=sampler,
        key=jax.random.key(arguments.seed),
        stream=write if arguments.stream else None,
        chunk=arguments.chunk,
        tail=arguments.tail,
        cache_dtype=arguments.cache_dtype,
        rerotate=arguments.rerotate,
        implementation=arguments.implementation,
    )
    print("" if arguments.stream else output.text, flush=True)
    print(summary(output.stats), file=sys.stderr)


def _prompt(arguments: argparse.Namespace) -> str:
    question = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    return question if arguments.file is None else f"{read_text(arguments.file).rstrip()}\n\n{question}"


def _models(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from kvec_jax.models.registry import KNOWN_MODELS

    table = Table(Column("name", no_wrap=True), "what it is", "license", "download", "here")
    for model in KNOWN_MODELS.values():
        here = "yes" if _is_here(model) else "no"
        table.add_row(model.name, model.summary, model.license, f"{model.size / 1e6:.0f} MB", here)
    console = Console()
    console.print(table)
    console.print("Also: a repository on the Hugging Face hub, a folder of safetensors, a .gguf file.", highlight=False)


def _show_model(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvec_jax.arguments import check_count
    from kvec_jax.models.load import load_config

    check_count("--budget", arguments.budget, 1)
    config = load_config(arguments.model)
    local = (
        f", {len(config.local_layers)} of them local (window {config.sliding_window})" if config.local_layers else ""
    )
    print(f"{arguments.model}: {config.model_type}, {config.num_hidden_layers} layers{local}")
    print(
        f"{config.num_attention_heads} query heads, {config.num_key_value_heads} key-value heads of {config.head_dim}, "
        f"width {config.hidden_size}, {config.vocab_size:,} tokens in the vocabulary"
    )
    print(f"context {config.max_position_embeddings:,}; one token's keys and values: {config.kv_bytes(1, 2):,} bytes")
    table = Table("prompt", "cache, bfloat16", f"budget {arguments.budget}", "share")
    for tokens in (8192, 32768, 131072):
        full, small = config.kv_bytes(tokens, 2), config.kv_bytes(tokens, 2, arguments.budget)
        beyond = " (beyond the context)" if tokens > config.max_position_embeddings else ""
        table.add_row(f"{tokens:,}{beyond}", f"{full / 1e6:,.1f} MB", f"{small / 1e6:,.1f} MB", f"{small / full:.1%}")
    Console().print(table)


def _is_here(model) -> bool:
    """Whether a known model needs no download: its file is in our cache, or its repository in that of the hub."""
    import huggingface_hub

    from kvec_jax.models.sources import cached_path

    in_hub_cache = huggingface_hub.try_to_load_from_cache(model.hub, "model.safetensors")
    return cached_path(model).is_file() or isinstance(in_hub_cache, str)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines).replace(":; ", ": ") or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
