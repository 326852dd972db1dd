"""Rebuilds a ``tokenizers.Tokenizer`` from the vocabulary, merges and scores in GGUF metadata."""

from typing import Any

from kvec_jax.errors import KvecError, LoadError, UnsupportedError

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

# How Qwen2 and Llama 3 publish that text is cut before merging; they differ in how many digits stay together.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {"smollm": None, "qwen2": _CUT % "", "llama-bpe": _CUT % "{1,3}"}


def build_core(metadata: dict[str, Any]):
    """The ``tokenizers.Tokenizer`` of GGUF ``metadata``.

    Byte-level BPE (``gpt2``) is rebuilt from its merges, SentencePiece's BPE (``llama``, which Gemma uses too) from
    the scores of its pieces: the pair whose union has the highest score is merged first.

    Raises:
        LoadError: When the metadata lacks something.
        UnsupportedError: For another kind of tokenizer or an unknown pre-tokenizer.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UnsupportedError(f"tokenizer.ggml.model = {kind!r} is not supported; known: {', '.join(builders)}")
    try:
        core = builders[kind](metadata)
        _add_special_tokens(core, metadata, normalized=kind == "llama")
    except KvecError:
        raise
    except KeyError as error:
        raise LoadError(f"the GGUF metadata lacks {error.args[0]}") from error
    except Exception as error:  # the library raises bare Exception
        raise LoadError(f"the tokenizer in the GGUF metadata is damaged ({error})") from error
    return core


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether a text begins with the bos token; where the metadata is silent, llama.cpp's defaults hold."""
    default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(metadata):
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedError(f"tokenizer.ggml.pre = {pre!r} is not supported; known: {', '.join(_PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3 takes a word that is in the vocabulary whole, whether or not merges lead to it.
    core = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=pre == "llama-bpe"))
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        cut = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = pre_tokenizers.Split(Regex(_PRE_TOKENIZERS[pre]), "isolated")
        cut = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    core.pre_tokenizer = pre_tokenizers.Sequence(cut)
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(metadata):
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(metadata)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    core = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_by_score(metadata, vocabulary),
            unk_token=metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    core.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return core


def _vocabulary(metadata) -> dict[str, int]:
    return {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}


def _merges_by_score(metadata, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third one, the one with the highest score first."""
    scores, kinds = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    normal = {text: i for text, i in vocabulary.items() if kinds[i] == 1}
    merges = []
    for text, i in normal.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                merges.append((-scores[i], i, cut, left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_special_tokens(core, metadata, *, normalized: bool) -> None:
    """Control tokens are special; the user's own are matched first too but are text like any other.

    SentencePiece looks for the latter after it has replaced spaces, hence ``normalized``.
    """
    from tokenizers import AddedToken

    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = [text for text, kind in zip(tokens, kinds) if kind == _CONTROL]
    defined = [text for text, kind in zip(tokens, kinds) if kind == _USER_DEFINED]
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    core.add_tokens([AddedToken(text, normalized=normalized, special=False) for text in defined])


__all__ = ["adds_bos", "build_core"]
