"""An example, and the tokens that it becomes: a context, a question after it, and the answer that is right."""

import dataclasses

from kvec_jax.calibrate.haystack import common, encode, render
from kvec_jax.models.tokenizer import Tokenizer

# Tokens of the right answer, at most, whose likelihood is measured.
LONGEST_GOLD = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A question about a text.

    Attributes:
        name: Within its task.
        context: The text; ``None`` where the question can't be told from it. Then only the protocol ``aware`` will do.
        question: What comes after the context, or all of the prompt.
        answers: What counts as right.
        gold: The text whose likelihood is measured; ``None`` means the first answer.
        metric: Name of a metric of ``kvec_jax.evals.metrics``; ``"agreement"`` means how often the most likely next
            token is that of the full cache, along ``gold``.
        max_new_tokens: Longest answer; 0 means that none is generated.
        answer_prefix: How the answer begins; it is part of the prompt.
        classes: For classification: all labels.
        first_line: Whether only the first line of an answer counts.
        chat: Whether the prompt goes through the model's chat template.
        length: Wanted number of tokens, of examples made on the spot.
        depth: Where in the context the answer stands, from 0 to 1, if it stands at one place.
    """

    name: str
    context: str | None
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    gold: str | None = None
    answer_prefix: str = ""
    classes: tuple[str, ...] = ()
    first_line: bool = False
    chat: bool = True
    length: int | None = None
    depth: float | None = None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """An example's tokens.

    Attributes:
        example: What they are of.
        tokens: The prompt.
        split: How many of them are context; the others are the question.
        gold: The right answer, cut where it is long.
    """

    example: Example
    tokens: list[int]
    split: int
    gold: list[int]


def make_prompt(tokenizer: Tokenizer, example: Example, most: int) -> Prompt:
    """The tokens of an example.

    Both protocols get the same tokens. The context ends with the last token that holds nothing of the question.

    Args:
        tokenizer: Of the model.
        example: To be encoded.
        most: Longest prompt, in tokens. Of a longer one the middle of the context is left out, as LongBench does.

    Raises:
        ValueError: If the question alone is longer, or the chat template changes it.
    """
    text, at = _render(tokenizer, example)
    whole = text + example.answer_prefix
    tokens = _encode(tokenizer, whole, example)
    split = common([_encode(tokenizer, text[:at], example), tokens]) if at else 0
    gold = _gold(tokenizer, example, whole, tokens)
    excess = len(tokens) - most
    if excess > 0:
        # Where the question can't be told from the context, only the very end is safe.
        room = (split or len(tokens) - 1) - excess
        if room < 1:
            raise ValueError(f"{example.name}: the question alone has more than {most} tokens")
        first = (room + 1) // 2
        tokens = tokens[:first] + tokens[first + excess :]
        split = max(split - excess, 0)
    return Prompt(example, tokens, split, gold[:LONGEST_GOLD])


def _render(tokenizer: Tokenizer, example: Example) -> tuple[str, int]:
    """The text of the prompt, and where in it the question begins; 0 if there is no telling."""
    if example.context is None:
        if not example.chat or tokenizer.chat_template is None:
            return example.question, 0
        return tokenizer.render_chat([{"role": "user", "content": example.question}]), 0
    if not example.question:
        return example.context, len(example.context)
    if not example.chat:
        return f"{example.context}\n\n{example.question}", len(example.context)
    text = render(tokenizer, example.context, example.question)
    at = text.rfind(example.question)
    if at <= 0:
        raise ValueError(f"{example.name}: the model's chat template changes the question")
    return text, at


def _gold(tokenizer: Tokenizer, example: Example, whole: str, tokens: list[int]) -> list[int]:
    """Tokens of the right answer as they follow those of the prompt."""
    gold = example.answers[0] if example.gold is None else example.gold
    goes_on = example.answer_prefix or not example.chat or tokenizer.chat_template is None
    if goes_on and not gold[:1].isspace() and not whole[-1:].isspace():
        gold = f" {gold}"
    both = _encode(tokenizer, whole + gold, example)
    return both[len(tokens) :] if both[: len(tokens)] == tokens else tokenizer.encode(gold)


def _encode(tokenizer: Tokenizer, text: str, example: Example) -> list[int]:
    if example.chat:
        return encode(tokenizer, text)
    return tokenizer.encode(text, add_special_tokens=True)
