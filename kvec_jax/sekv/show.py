"""Spans for people: a text with its spans and anchors marked, and a picture of its surprisal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.sekv.plan import Limits
from kvec_jax.sekv.policy import SeKV, read_everything
from kvec_jax.sekv.spans import segment, surprisals, threshold
from kvec_jax.session import LanguageModel, pad_prompts

# Backgrounds of neighbouring spans, and how exact tokens look.
_SPANS = ("on grey19", "on grey35")
_ANCHOR, _ALWAYS = "bold black on bright_yellow", "on dark_green"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segmentation:
    """A text in spans.

    Attributes:
        pieces: Text of each token.
        surprisal: float32 [T], in nats.
        threshold: Above it a token begins a span.
        span_of: int32 [T], number of each token's span, -1 for exact ones.
        anchors: bool [T], exact tokens that were chosen for their surprisal.
    """

    pieces: list[str]
    surprisal: np.ndarray
    threshold: float
    span_of: np.ndarray
    anchors: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each span."""
        return np.bincount(self.span_of[self.span_of >= 0])

    def summary(self) -> str:
        """One line of numbers."""
        exact, lengths = int(np.sum(self.span_of < 0)), self.lengths
        sizes = ""
        if len(lengths):
            sizes = f", {lengths.min()} to {lengths.max()} tokens each, {lengths.mean():.0f} on average"
        return (
            f"{len(self.pieces):,} tokens: {exact:,} exact ({exact / len(self.pieces):.1%}), "
            f"{int(self.anchors.sum())} of them anchors; {len(lengths)} spans{sizes}"
        )

    def marked(self) -> str:
        """The text with a bar where a span begins, and brackets around exact tokens: ``[[`` for anchors."""
        parts, last = [], None
        for piece, span, anchor in zip(self.pieces, self.span_of.tolist(), self.anchors.tolist(), strict=True):
            kind = "anchor" if anchor else "exact" if span < 0 else span
            if kind != last:
                parts += [_CLOSING.get(last, ""), _OPENING.get(kind, "|")]
            parts.append(piece)
            last = kind
        return "".join([*parts, _CLOSING.get(last, "")])

    def colored(self):
        """The text as ``rich.text.Text``: spans on two greys, anchors on yellow, other exact tokens on green."""
        from rich.text import Text

        text = Text()
        for piece, span, anchor in zip(self.pieces, self.span_of.tolist(), self.anchors.tolist(), strict=True):
            text.append(piece, _ANCHOR if anchor else _ALWAYS if span < 0 else _SPANS[span % 2])
        return text

    def draw(self, axes=None):
        """A picture of the surprisal of every token, with spans shaded and anchors marked; returns its axes.

        Raises:
            ImportError: If matplotlib is missing; it names the extra that brings it.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("pictures need matplotlib: pip install 'kvec-jax[eval]'") from error
        if axes is None:
            axes = plt.subplots(figsize=(10, 2.5), layout="constrained")[1]
        at = np.arange(len(self.pieces))
        for number in range(len(self.lengths)):
            inside = at[self.span_of == number]
            axes.axvspan(inside[0] - 0.5, inside[-1] + 0.5, color=("0.93", "0.82")[number % 2], lw=0)
        axes.bar(at, self.surprisal, width=0.8, color="0.45")
        axes.bar(at[self.anchors], self.surprisal[self.anchors], width=1.2, color="C1", label="anchors")
        axes.axhline(self.threshold, color="C3", lw=1, ls="--", label="threshold")
        axes.set(xlabel="token", ylabel="surprisal (nats)", xlim=(-0.5, len(at) - 0.5))
        axes.legend(loc="upper right")
        return axes


_OPENING = {"anchor": "[[", "exact": "["}
_CLOSING = {"anchor": "]]", "exact": "]"}


def find_spans(lm: LanguageModel, text: str, policy: SeKV = SeKV(), *, cap_anchors: bool = True) -> Segmentation:  # noqa: B008 - immutable
    """Cuts a text as SeKV cuts a prompt.

    Args:
        lm: Model and tokenizer.
        text: Not longer than the model's context.
        policy: Its sizes are used, those of a device share.
        cap_anchors: Whether to stay within them. ``False`` is the paper's rule: every token above the threshold is an
            anchor, which may be more than any share has room for.

    Raises:
        ValueError: If there is no text, or too much of it.
    """
    ids = lm.encode(text)
    context = lm.config.max_position_embeddings
    if not 0 < len(ids) <= context:
        raise ValueError(f"text: expected 1 to {context} tokens (the model's context), got {len(ids)}")
    policy.prepare(lm.model)
    tokens, lengths = pad_prompts([ids], context)
    found, surprisal, level = _find(lm.model, tokens, lengths, policy, cap_anchors)
    stream = lm.tokenizer.stream(skip_special_tokens=False)
    pieces = [stream.push(token) for token in ids]
    pieces[-1] += stream.finish()
    row = jax.tree.map(lambda x: np.asarray(x[0, : len(ids)]), (surprisal, found.span_of, found.anchors))
    return Segmentation(pieces=pieces, surprisal=row[0], threshold=float(level[0]), span_of=row[1], anchors=row[2])


@functools.partial(jax.jit, static_argnames=("policy", "cap_anchors"))
def _find(model, tokens, lengths, policy: SeKV, cap_anchors: bool):
    T = tokens.shape[1]
    limits = policy.limits(model.config, lengths, T, model.dtype.itemsize)
    if not cap_anchors:
        limits = _uncapped(limits, lengths, T)
    surprisal = surprisals(model, read_everything(model, tokens, lengths)[0], tokens)
    return segment(surprisal, lengths, limits, policy.alpha), surprisal, threshold(surprisal, lengths, policy.alpha)


def _uncapped(limits: Limits, lengths, T: int) -> Limits:
    return dataclasses.replace(limits, anchors=jnp.broadcast_to(jnp.int32(T), lengths.shape), max_exact=T)
