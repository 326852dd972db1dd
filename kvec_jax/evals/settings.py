"""How examples are run."""

import dataclasses

from kvec_jax.arguments import check_choice, check_count

PROTOCOLS = ("aware", "agnostic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How examples are run.

    Attributes:
        protocols: ``"aware"``: the question is part of the prompt that is compressed, as in the papers on eviction;
            ``"agnostic"``: only the context is compressed, and the question comes after, as in kvpress.
        batch: Examples of about one length that are run together.
        memory: Bytes that the caches of one reading may take together; where more policies and budgets are asked for,
            prompts are read again.
        separate: Whether to read prompts once for every policy and budget, which takes longer; then the seconds of
            reading are each policy's own.
        most_tokens: Longest prompt; of longer ones the middle is left out. ``None`` means what the model can take.
    """

    protocols: tuple[str, ...] = ("aware",)
    batch: int = 8
    memory: int = 4 << 30
    separate: bool = False
    most_tokens: int | None = None

    def __post_init__(self):
        for protocol in self.protocols:
            check_choice("protocol", protocol, PROTOCOLS)
        check_count("batch", self.batch, 1)
        check_count("memory", self.memory, 1)
        if self.most_tokens is not None:
            check_count("most_tokens", self.most_tokens, 64)
