"""Texts that are read in parts, a document first and questions later: where each part begins and ends, in tokens."""

import dataclasses
from collections.abc import Sequence

# Between a document and what is said about it.
BREAK = "\n\n"
_DOCUMENT, _ANSWER, _NEXT = "<<the document>>", "<<the answer>>", "<<the next question>>"


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a chat template puts around the parts: all empty for a model without chat.

    Attributes:
        before: From the beginning to the document, which opens a user's turn.
        answer: From the end of that turn to where the assistant begins to speak.
        again: From the end of the assistant's turn to the next question; ``None`` where there are no turns.
    """

    before: str = ""
    answer: str = ""
    again: str | None = None

    @classmethod
    def of(cls, tokenizer, earlier: Sequence[dict] = ()) -> "Frame":
        """What the tokenizer's chat template gives, after ``earlier`` messages such as a system prompt.

        Raises:
            ValueError: If there is no template, or it refuses the messages or doesn't repeat them word for word.
        """
        opening = [*earlier, {"role": "user", "content": _DOCUMENT}]
        turns = [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        before, answer = _split(tokenizer.render_chat(opening), _DOCUMENT)
        _, rest = _split(tokenizer.render_chat([*opening, *turns]), _ANSWER)
        return cls(before, answer, _split(rest, _NEXT)[0])


def _split(text: str, part: str) -> tuple[str, str]:
    before, found, after = text.partition(part)
    if not found:
        raise ValueError("the chat template changes what messages say, so a document can't be read before its question")
    return before, after


def first_tokens(tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Tokens of a ``text`` that goes on later: a break at its end is cut into tokens as it will be before a word."""
    probe = "What"
    joint, alone = tokenizer.encode(text + probe, add_special_tokens), tokenizer.encode(probe)
    if joint[-len(alone) :] == alone:
        return joint[: -len(alone)]
    return tokenizer.encode(text, add_special_tokens)


def later_tokens(tokenizer, text: str) -> list[int]:
    """Tokens of a ``text`` that stands after a break: some tokenizers cut the beginning of a text differently."""
    joint, first = tokenizer.encode(BREAK + text), tokenizer.encode(BREAK)
    return joint[len(first) :] if joint[: len(first)] == first else tokenizer.encode(text)
