"""``kvec spans`` and ``kvec train-zoom``: their options, and what they print."""

import argparse
import dataclasses
import pathlib
from typing import Any

from kvec_jax.command_options import add_model_arguments, add_settings, list_of, read_text, settings_of
from kvec_jax.policies.options import parse_setting


def add_spans(commands) -> None:
    """Adds ``kvec spans``."""
    parser = commands.add_parser(
        "spans",
        help="show the spans that SeKV cuts a text into",
        description="Prints a text with its spans: on a terminal in two greys, anchors on yellow, sinks and window on "
        "green; otherwise with a bar where a span begins, [exact tokens] and [[anchors]].",
    )
    parser.add_argument("file", metavar="FILE", help="the text, in UTF-8")
    add_model_arguments(parser)
    parser.add_argument("--tokens", type=int, metavar="N", help="only the first N (default: the model's context)")
    parser.add_argument("--share", type=float, default=0.1, metavar="S", help="of the cache's bytes (%(default)s)")
    parser.add_argument("--alpha", type=float, default=1.0, metavar="A", help="a token cuts that is A standard "
        "deviations more surprising than the mean (default: %(default)s)")  # fmt: skip
    parser.add_argument("--min-span", type=int, default=16, metavar="N", help="fewest tokens (default: %(default)s; "
        "more where the share asks for it)")  # fmt: skip
    parser.add_argument("--max-span", type=int, metavar="N", help="most tokens (default: twice the fewest)")
    parser.add_argument("--all-anchors", action="store_true", help="the paper's rule: every token that cuts is kept "
        "as an anchor, however many bytes that takes")  # fmt: skip
    parser.add_argument("--picture", metavar="FILE", help="also draw the surprisal and the spans (needs matplotlib)")
    parser.set_defaults(run=_spans)


def add_train_zoom(commands) -> None:
    """Adds ``kvec train-zoom``."""
    parser = commands.add_parser(
        "train-zoom",
        help="train the head by which the policy sekv chooses spans",
        description="Trains a zoom-in head beside a frozen model, on windows of text. When it is interrupted, the same "
        "command goes on. The last tenth of each text is held out.",
    )
    add_model_arguments(parser)
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="what to train on, in UTF-8")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of head, checkpoints and metrics")
    parser.add_argument("--share", type=float, metavar="S", help="of the cache's bytes on the device (default: 0.1)")
    parser.add_argument("--weight", type=parse_setting, action="append", default=[], metavar="KEY=VALUE",
        help="of a loss: zoom, wanted, recon, budget or gates; may be repeated (default: the paper's)")  # fmt: skip
    settings = {
        "steps": (int, "N", "of the optimiser (default: 300)"),
        "lengths": (
            list_of(int),
            "LIST",
            "of the windows, each for an equal part of the steps (default: 512,768,1024)",
        ),
        "queries": (int, "N", "last tokens of each window, which are predicted (default: 128)"),
        "batch": (int, "N", "windows of a step, which all devices share (default: one for each)"),
        "learning_rate": (float, "R", "at its highest (default: 0.001)"),
        "every": (int, "N", "steps between validations and checkpoints (default: 50)"),
        "validation": (int, "N", "held-out windows (default: 8)"),
        "seed": (int, "N", "of weights and windows (default: 0)"),
    }
    add_settings(parser, settings)
    parser.set_defaults(run=_train)


def _spans(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    import kvec_jax as kv
    from kvec_jax.arguments import check_count
    from kvec_jax.sekv.policy import SeKV
    from kvec_jax.sekv.show import find_spans

    # What can be wrong is looked at before the model is loaded.
    if arguments.tokens is not None:
        check_count("--tokens", arguments.tokens, 1)
    policy = SeKV(arguments.share, alpha=arguments.alpha, min_span=arguments.min_span, max_span=arguments.max_span)
    text = read_text(arguments.file)
    lm = kv.load(arguments.model, dtype=arguments.dtype)
    ids = lm.encode(text)
    wanted = lm.config.max_position_embeddings if arguments.tokens is None else arguments.tokens
    if len(ids) > wanted:
        text = lm.tokenizer.decode(ids[:wanted])
    found = find_spans(lm, text, policy, cap_anchors=not arguments.all_anchors)
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(found.colored())
    else:
        print(found.marked())
    Console(stderr=True, highlight=False).print(found.summary())
    if arguments.picture:
        found.draw().figure.savefig(arguments.picture)


def _train(arguments: argparse.Namespace) -> None:
    import jax
    from rich.console import Console

    import kvec_jax as kv
    from kvec_jax.progress import Bar
    from kvec_jax.sekv.policy import SeKV
    from kvec_jax.sekv.training import HEAD_FILE, Training, train
    from kvec_jax.sekv.windows import Windows
    from kvec_jax.shipped import known_name

    given = settings_of(arguments)
    if arguments.share is not None:
        given["policy"] = SeKV(arguments.share)
    devices = jax.devices()
    given.setdefault("batch", len(devices))
    training = Training(**given, weights=_weights(arguments.weight))
    texts = [read_text(path) for path in arguments.text]
    console = Console(stderr=True, highlight=False)
    console.print(f"Loading {arguments.model}", markup=False)
    lm = kv.load(arguments.model, dtype=arguments.dtype)
    windows = Windows([lm.encode(text) for text in texts], [pathlib.Path(path).name for path in arguments.text])
    mesh = jax.make_mesh((len(devices),), ("data",)) if len(devices) > 1 else None
    told = {"model": known_name(arguments.model) or lm.name, "devices": [device.device_kind for device in devices]}
    try:
        with Bar(console) as bar:
            _, about = train(
                lm.model, windows, arguments.out, training, mesh=mesh, provenance=told,
                progress=lambda step, metrics: bar("training", step, training.steps, _words(metrics)),
            )  # fmt: skip
    except KeyboardInterrupt:
        console.print(f"Interrupted. The same command goes on from {arguments.out}.", markup=False)
        raise
    console.print(
        f"{pathlib.Path(arguments.out) / HEAD_FILE}: KL on held-out text {about['validation_kl']:.4f} after "
        f"{about['steps']} steps, {about['untrained_validation_kl']:.4f} untrained; {about['parameters']:,} numbers, "
        f"{about['share_of_model']:.2%} of the model",
        markup=False,
    )


def _weights(given: list[tuple[str, Any]]):
    """The weights of the losses, of which some were given."""
    from kvec_jax.sekv.losses import Weights

    names = [field.name for field in dataclasses.fields(Weights)]
    for name, value in given:
        if name not in names:
            raise ValueError(f"--weight: expected one of {', '.join(names)}, got {name!r}")
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise ValueError(f"--weight: expected a number from 0 up for {name}, got {value!r}")
    return Weights(**{name: float(value) for name, value in given})


def _words(metrics: dict[str, float]) -> str:
    return f"KL {metrics['kl']:.3f}, zoom {metrics['zoom']:.2f}, loss {metrics['total']:.2f}"
