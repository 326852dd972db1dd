"""Room for an example made on the spot: so many tokens, and the text that fills them."""

import dataclasses
import random
from collections.abc import Callable, Sequence

from kvec_jax.calibrate.haystack import Haystack, encode, render
from kvec_jax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Room:
    """What a task fills.

    Attributes:
        tokenizer: Of the model.
        haystack: Text to hide things in.
        length: Most tokens of a prompt, template and question included.
    """

    tokenizer: Tokenizer
    haystack: Haystack
    length: int

    def bury(self, sentences: Sequence[str], depths: Sequence[float], question: str, rng: random.Random) -> str:
        """A context as long as the question allows, with sentences hidden at depths from 0 to 1, which don't fall."""
        pieces = self.haystack.take(self.length, rng)
        return self.haystack.hide(sentences, depths, pieces, self.length, lambda text: self.size(text, question))

    def fill(self, context: Callable[[int], str], question: str, least: int) -> str:
        """The longest ``context(count)`` that fits, made of a number of things.

        Raises:
            ValueError: If not even ``least`` things fit.
        """
        low, high = least, least
        if self.size(context(least), question) > self.length:
            raise ValueError(f"lengths: {self.length} tokens are too few for a question about {least} things")
        while self.size(context(high), question) <= self.length:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.size(context(middle), question) <= self.length else (low, middle)
        return context(low)

    def size(self, context: str, question: str) -> int:
        """Tokens of the prompt."""
        return len(encode(self.tokenizer, render(self.tokenizer, context, question)))
