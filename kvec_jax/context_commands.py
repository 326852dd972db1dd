"""``kvec compress`` and ``kvec ask``: a text is read once, and asked as often as one likes."""

import argparse
import pathlib
import sys

from kvec_jax.command_options import (
    add_answer_arguments,
    add_model_arguments,
    add_policy_arguments,
    policy_of,
    read_text,
    sampler_of,
    summary,
    write,
)


def add_compress(commands) -> None:
    """Adds ``kvec compress``."""
    compress = commands.add_parser(
        "compress",
        help="read a text once and keep its compressed cache in a file",
        description="Reads a text, compresses its cache and writes that to a file, for kvec ask.",
    )
    compress.add_argument("file", metavar="FILE", help="the text, in UTF-8")
    compress.add_argument("--out", required=True, metavar="PATH", help="what to write, such as book.kv")
    add_model_arguments(compress)
    compress.add_argument("--raw", action="store_true", help="read the text as it is, without the chat template")
    compress.add_argument("--policy", required=True, metavar="NAME", help="such as snapkv or expected")
    add_policy_arguments(compress)
    compress.set_defaults(run=_compress)


def add_ask(commands) -> None:
    """Adds ``kvec ask``."""
    ask = commands.add_parser(
        "ask",
        help="ask questions about a text that kvec compress has read",
        description="Writes the answers, which are found as one batch, to standard output in the order of the "
        "questions, each below its question where there are several, and what they cost to standard error.",
    )
    ask.add_argument("context", metavar="PATH", help="what kvec compress wrote")
    ask.add_argument("questions", nargs="+", metavar="QUESTION", help="what to ask")
    ask.add_argument("--model", metavar="MODEL", help="where the model is (default: where it was for kvec compress)")
    add_answer_arguments(ask)
    ask.set_defaults(run=_ask)


def _compress(arguments: argparse.Namespace) -> None:
    policy = policy_of(arguments)
    text = read_text(arguments.file)
    out = pathlib.Path(arguments.out)
    if out.is_dir():
        raise ValueError(f"--out: expected a file to write, and {out} is a folder")
    if not out.parent.is_dir():
        raise ValueError(f"--out: no such folder: {out.parent}")

    import kvec_jax as kv

    if not isinstance(policy, kv.Policy):
        raise ValueError(f"--policy: only contexts of rows that were chosen can be saved, not those of {policy.name!r}")
    model = kv.load(arguments.model, dtype=arguments.dtype)
    context = model.compress(
        text,
        policy,
        chat=False if arguments.raw else None,
        chunk=arguments.chunk,
        cache_dtype=arguments.cache_dtype,
        rerotate=arguments.rerotate,
    )
    context.save(arguments.out)
    full = model.config.kv_bytes(context.tokens, context.cache.tail_keys.dtype.itemsize)
    size = context.cache.pool_nbytes
    print(
        f"{context.tokens:,} tokens read; cache {size / 1e6:,.1f} MB, {size / full:.1%} of the full cache's "
        f"{full / 1e6:,.1f} MB, in {arguments.out}",
        file=sys.stderr,
    )


def _ask(arguments: argparse.Namespace) -> None:
    sampler = sampler_of(arguments)
    if not all(question.strip() for question in arguments.questions):
        raise ValueError("QUESTION: expected a text, got an empty one")

    import jax

    import kvec_jax as kv
    from kvec_jax.context_file import read_identity

    if arguments.stream and len(arguments.questions) > 1:
        raise ValueError(f"--stream: expected one question, got {len(arguments.questions)}")
    made_with = read_identity(arguments.context)
    model = kv.load(arguments.model or made_with.name, dtype=made_with.dtype)
    context = kv.load_context(arguments.context, model)
    outputs = model.ask(
        context,
        arguments.questions,
        max_new_tokens=arguments.max_new_tokens,
        sampler=sampler,
        key=jax.random.key(arguments.seed),
        stream=(lambda _, piece: write(piece)) if arguments.stream else None,
    )
    answers = [output.text for output in outputs]
    if len(answers) > 1:
        answers = [f"> {question}\n{answer}" for question, answer in zip(arguments.questions, answers, strict=True)]
    print("" if arguments.stream else "\n\n".join(answers), flush=True)
    for output in outputs:
        asked = output.stats.prompt_tokens - context.tokens
        read = f"{asked:,} tokens after {context.tokens:,} of the context"
        print(summary(output.stats, read), file=sys.stderr)
