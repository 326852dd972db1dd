"""Text to token ids and back, over the ``tokenizers`` library."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from kvec_jax.errors import LoadError
from kvec_jax.models.json_file import read_object

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A model's tokenizer, with what generation needs to know beside it.

    Args:
        core: A ``tokenizers.Tokenizer``.
        eos_token_ids: Tokens that end a generation.
        bos_token_id: Token that begins a text, if there is one.
        add_bos: Whether a text begins with it; ``None`` leaves that to the tokenizer's own post-processor.
        chat_template: Jinja source, or ``None`` for a model without chat.
    """

    def __init__(
        self,
        core,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ):
        self._core = core
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos
        self.chat_template = chat_template

    @classmethod
    def from_file(cls, path, **attributes) -> "Tokenizer":
        """Reads a ``tokenizer.json``; ``attributes`` are those of the class.

        Raises:
            LoadError: When the file can't be read or understood.
        """
        import tokenizers

        path = pathlib.Path(path)
        if not path.is_file():
            raise LoadError(f"{path}: no such file")
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise LoadError(f"{path}: not a readable tokenizer.json ({error})") from error
        return cls(core, **attributes)

    @classmethod
    def from_folder(cls, folder, eos_token_ids: Sequence[int] = (), bos_token_id: int | None = None) -> "Tokenizer":
        """Reads ``tokenizer.json`` with what ``tokenizer_config.json`` and ``chat_template.jinja`` add.

        Args:
            folder: Holds ``tokenizer.json``; the other two may be missing.
            eos_token_ids: From the model's configuration; the tokenizer's own end token is used where it is empty.
            bos_token_id: From the model's configuration; the tokenizer's own comes first.

        Raises:
            LoadError: When a file can't be read or understood.
        """
        folder = pathlib.Path(folder)
        tokenizer = cls.from_file(folder / "tokenizer.json")
        settings_file = folder / "tokenizer_config.json"
        settings = read_object(settings_file) if settings_file.is_file() else {}
        own_bos, own_eos = (tokenizer.token_id(_token_text(settings.get(f"{name}_token"))) for name in ("bos", "eos"))
        tokenizer.bos_token_id = bos_token_id if own_bos is None else own_bos
        tokenizer.eos_token_ids = tuple(eos_token_ids) or (() if own_eos is None else (own_eos,))
        tokenizer.add_bos = settings.get("add_bos_token")
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            tokenizer.chat_template = template_file.read_text(encoding="utf-8")
        else:
            tokenizer.chat_template = _default_template(settings.get("chat_template"))
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any]) -> "Tokenizer":
        """Rebuilds the tokenizer that a GGUF file's ``metadata`` describes.

        Raises:
            LoadError: When the metadata lacks something.
            UnsupportedError: For a kind of tokenizer, or a pre-tokenizer, that isn't known here.
        """
        from kvec_jax.models.gguf import end_token_ids
        from kvec_jax.models.tokenizer_gguf import adds_bos, build_core

        return cls(
            build_core(metadata),
            eos_token_ids=end_token_ids(metadata),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            add_bos=adds_bos(metadata),
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    def save(self, path) -> None:
        """Writes a ``tokenizer.json``; what ``settings`` returns isn't in it."""
        self._core.save(str(path))

    def settings(self) -> dict[str, Any]:
        """The attributes beside ``tokenizer.json``, as ``from_file`` takes them."""
        return {
            "eos_token_ids": list(self.eos_token_ids),
            "bos_token_id": self.bos_token_id,
            "add_bos": self.add_bos,
            "chat_template": self.chat_template,
        }

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._core.get_vocab_size(with_added_tokens=True)

    def token_id(self, text: str | None) -> int | None:
        """The id of the token written ``text``, or ``None``."""
        return None if text is None else self._core.token_to_id(text)

    def token_text(self, token_id: int | None) -> str:
        """How the token is written; empty for ``None`` and for ids without a token."""
        return "" if token_id is None else self._core.id_to_token(token_id) or ""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens written in the text are recognised.

        Args:
            text: What to encode.
            add_special_tokens: Whether to begin with the token that the model wants at the beginning of a text.
                It is there once, also when the text begins with it already.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected a string, got {type(text).__name__}")
        own_way = add_special_tokens and self.add_bos is None
        ids = self._core.encode(text, add_special_tokens=own_way).ids
        bos = self.bos_token_id
        if add_special_tokens and self.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if own_way and bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` (any iterable of integers, an array too)."""
        return self._core.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> "TextStream":
        """A decoder for tokens that arrive one at a time."""
        return TextStream(self, skip_special_tokens)

    def render_chat(self, messages, **options) -> str:
        """The prompt for ``messages``; ``options`` and errors are those of ``kvec_jax.models.chat.render_chat``."""
        from kvec_jax.models.chat import render_chat

        if self.chat_template is None:
            raise ValueError("this model has no chat template; pass a plain string")
        eos = self.eos_token_ids[0] if self.eos_token_ids else None
        return render_chat(
            self.chat_template,
            messages,
            bos_token=self.token_text(self.bos_token_id),
            eos_token=self.token_text(eos),
            **options,
        )


class TextStream:
    """Turns tokens into text as they come; half a UTF-8 character is held back until it is whole.

    The pieces, that of ``finish`` included, are together the text of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Tokens since the start of the last piece: decoders treat the first token of a text in their own way.
        self._ids: list[int] = []
        self._told = 0

    def push(self, token_id: int) -> str:
        """The text that becomes certain with this token; may be empty."""
        self._ids.append(int(token_id))
        before, whole = self._texts()
        if whole.endswith(_REPLACEMENT) or len(whole) <= len(before):
            return ""
        self._ids, self._told = self._ids[self._told :], len(self._ids) - self._told
        return whole[len(before) :]

    def finish(self) -> str:
        """What is still held back, with replacement characters for incomplete ones."""
        before, whole = self._texts()
        self._ids, self._told = [], 0
        return whole[len(before) :]

    def _texts(self) -> tuple[str, str]:
        told = self._tokenizer.decode(self._ids[: self._told], self._skip)
        return told, self._tokenizer.decode(self._ids, self._skip)


def _token_text(token) -> str | None:
    """A special token in ``tokenizer_config.json`` is a string, or an object with ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def _default_template(template) -> str | None:
    """``chat_template`` is a string, or a list of named ones of which ``default`` is taken."""
    if isinstance(template, list):
        return next((item["template"] for item in template if item.get("name") == "default"), None)
    return template


__all__ = ["TextStream", "Tokenizer"]
