"""Prompts of a wanted length: pieces of held-out text, facts hidden among them, and a request at the end."""

import random
import textwrap
from collections.abc import Callable, Sequence

from kvec_jax.calibrate.needles import Needle
from kvec_jax.models.tokenizer import Tokenizer

_LONGEST_PIECE = 300  # characters


class Haystack:
    """Text that prompts are cut from.

    Args:
        tokenizer: Of the model. Prompts go through its chat template where it has one.
        text: Paragraphs, separated by empty lines.
    """

    def __init__(self, tokenizer: Tokenizer, text: str):
        self.text = text
        self._tokenizer = tokenizer
        self._pieces = list(_pieces(text))
        self._sizes = [len(tokenizer.encode(piece + "\n\n")) for piece in self._pieces]

    @property
    def size(self) -> int:
        """About how many tokens the text has."""
        return sum(self._sizes)

    def prompts(
        self, length: int, requests: Sequence[str], needles: Sequence[Needle], rng: random.Random
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Several requests about one text, each a prompt of its own.

        Args:
            length: Most tokens of a prompt, template and request included; the text is as long as that allows.
            requests: What stands at the end, one for each prompt.
            needles: Facts that are hidden in the text, in this order, each at a random place of its share of it.
            rng: Chooses the places, and where in the source the text begins.

        Returns:
            The prompts' tokens; and for each needle the first token of its answer and one past its last.

        Raises:
            ValueError: If the length is too short for the requests.
        """
        pieces = self.take(length, rng)
        depths = [(i + rng.random()) / len(needles) for i in range(len(needles))]

        def texts(text):
            return [render(self._tokenizer, text, request) for request in requests]

        def size(text):
            return max(len(encode(self._tokenizer, whole)) for whole in texts(text))

        text = self.hide([needle.sentence for needle in needles], depths, pieces, length, size)
        rendered = texts(text)
        prompts = [encode(self._tokenizer, whole) for whole in rendered]
        return prompts, [self._span(rendered[0], prompts[0], needle) for needle in needles]

    def hide(
        self,
        sentences: Sequence[str],
        depths: Sequence[float],
        pieces: Sequence[str],
        length: int,
        size: Callable[[str], int],
    ) -> str:
        """A text as long as possible, with sentences hidden in it.

        Args:
            sentences: In the order in which they stand in the text.
            depths: Where each stands, from 0 (at the beginning) to 1 (at the end), not falling.
            pieces: What ``take`` gave; the text is made of the first of them, as many as fit.
            length: Most tokens.
            size: How many tokens there are with a text.

        Raises:
            ValueError: If not even one piece fits.
        """
        pieces = list(pieces)
        while pieces:
            parts = list(pieces)
            for sentence, depth in reversed(list(zip(sentences, depths, strict=True))):
                parts.insert(round(depth * len(pieces)), sentence)
            text = "\n\n".join(parts)
            excess = size(text) - length
            if excess <= 0:
                return text
            while pieces and excess > 0:
                excess -= self._sizes[self._pieces.index(pieces.pop())]
        raise ValueError(f"lengths: {length} tokens are too few for a question about a text")

    def take(self, room: int, rng: random.Random) -> list[str]:
        """Pieces from a random place on that together have ``room`` tokens; after the last comes the first."""
        at = rng.randrange(len(self._pieces))
        taken = []
        while room > 0 and len(taken) < len(self._pieces):
            taken.append(self._pieces[at])
            room -= self._sizes[at]
            at = (at + 1) % len(self._pieces)
        return taken

    def _span(self, text: str, tokens: Sequence[int], needle: Needle) -> tuple[int, int]:
        """The tokens of the answer, found by encoding the text up to it and up to its end."""
        start = text.index(needle.sentence) + needle.sentence.index(needle.answer)
        before = text[:start].rstrip()  # most tokenizers put a space into the token after it
        up_to_end = text[: start + len(needle.answer)]
        first, last = (common([encode(self._tokenizer, part), tokens]) for part in (before, up_to_end))
        return first, last


def render(tokenizer: Tokenizer, text: str, request: str) -> str:
    """A prompt with a request about a text, through the chat template if the model has one."""
    if tokenizer.chat_template is None:
        return f"{text}\n\nQuestion: {request}\nAnswer:"
    return tokenizer.render_chat([{"role": "user", "content": f"{text}\n\n{request}"}])


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a rendered prompt; a chat template writes the tokens that begin a text itself."""
    return tokenizer.encode(text, add_special_tokens=tokenizer.chat_template is None)


def _pieces(text: str):
    """Paragraphs, those that are too long cut between words."""
    for paragraph in text.split("\n\n"):
        if len(paragraph) <= _LONGEST_PIECE:
            pieces = [paragraph]
        else:
            pieces = textwrap.wrap(paragraph, _LONGEST_PIECE, replace_whitespace=False, expand_tabs=False)
        yield from (piece.strip("\n") for piece in pieces if piece.strip())


def common(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens at the beginning are the same in all rows.

    Example:
        >>> common([[5, 6, 7], [5, 6, 8, 9]])
        2
    """
    return next((i for i, column in enumerate(zip(*rows)) if len(set(column)) > 1), min(map(len, rows)))
