"""Tokenizers from tokenizer.json and from GGUF metadata, without a real model."""

import json

import numpy as np
import pytest

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models.tokenizer import Tokenizer
from tests.models.files import byte_tokenizer

TEXTS = ["plain", "café 日本 👍🏽 x²", "\ttabs\r\n  and  spaces ", "\N{REPLACEMENT CHARACTER} itself", ""]


def gguf_metadata(values):
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def byte_level(pre="smollm"):
    return Tokenizer.from_gguf(gguf_metadata(byte_tokenizer(pre)))


def sentencepiece(**changes):
    """Pieces with scores as SentencePiece trains them: the better the score, the earlier the merge."""
    pieces = ["<unk>", "<s>", "</s>", "<turn>", "\n\n", *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [2, 3, 3, 3, 4] + [6] * 256
    letters = ["▁", "h", "e", "l", "o", "w", "r", "d"]
    words = ["he", "ll", "▁w", "or", "hell", "hello", "▁wor", "▁world", "ld", "lo"]
    scores = [0.0] * len(pieces) + [-100.0] * len(letters) + [-float(i) for i in range(1, len(words) + 1)]
    pieces, kinds = pieces + letters + words, kinds + [1] * (len(letters) + len(words))
    values = dict(model="llama", tokens=pieces, token_type=kinds, scores=scores)
    values |= dict(bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    return Tokenizer.from_gguf(gguf_metadata(values | changes))


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trip(pre, text):
    tokenizer = byte_level(pre)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.asarray(ids, np.int32)) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_stream_gives_the_whole_text_in_whole_characters(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_stream_ends_within_a_character():
    tokenizer = byte_level()
    stream = tokenizer.stream()
    ids = tokenizer.encode("a👍")[:-1]
    assert "".join(stream.push(i) for i in ids) == "a"
    assert "\N{REPLACEMENT CHARACTER}" in stream.finish()
    assert stream.finish() == ""


def test_sentencepiece_merges_by_score():
    tokenizer = sentencepiece(add_space_prefix=False)
    texts = [tokenizer.token_text(i) for i in tokenizer.encode("hello world")]
    assert texts == ["hello", "▁world"]
    # "ll" comes before "lo": "hello" is reached over "hell", and a bare "llo" is "ll" and "o".
    assert [tokenizer.token_text(i) for i in tokenizer.encode("llo")] == ["ll", "o"]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("é")] == ["<0xC3>", "<0xA9>"]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("h\n\n<turn>o")] == ["h", "\n\n", "<turn>", "o"]


def test_sentencepiece_space_in_front():
    tokenizer = sentencepiece()
    assert [tokenizer.token_text(i) for i in tokenizer.encode("world")] == ["▁world"]
    assert tokenizer.decode(tokenizer.encode("world hello")) == "world hello"


def test_bos_is_there_once():
    tokenizer = sentencepiece(add_bos_token=True)
    plain = tokenizer.encode("hello")
    assert tokenizer.encode("hello", add_special_tokens=True) == [1, *plain]
    assert tokenizer.encode("<s>hello", add_special_tokens=True).count(1) == 1
    assert sentencepiece(add_bos_token=False).encode("hello", add_special_tokens=True) == plain
    assert sentencepiece().add_bos is True  # SentencePiece's default
    assert byte_level().add_bos is False


def test_special_tokens_are_left_out_of_text():
    tokenizer = sentencepiece()
    ids = [1, *tokenizer.encode("hello"), 2]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")
    assert tokenizer.token_id("<s>") == 1
    assert tokenizer.token_id("nothing of the kind") is None
    assert tokenizer.token_text(10**6) == ""


def test_end_tokens_from_gguf():
    values = byte_tokenizer()
    values["tokens"] = [*values["tokens"], "<|im_end|>", "<|endoftext|>"]
    values["token_type"] = [*values["token_type"], 3, 1]
    assert Tokenizer.from_gguf(gguf_metadata(values)).eos_token_ids == (2, 256)


@pytest.mark.parametrize("drop", ["tokens", "token_type", "merges"])
def test_incomplete_metadata(drop):
    values = {key: value for key, value in byte_tokenizer().items() if key != drop}
    with pytest.raises(LoadError, match=f"lacks tokenizer.ggml.{drop}"):
        Tokenizer.from_gguf(gguf_metadata(values))


def test_unknown_kinds():
    with pytest.raises(UnsupportedError, match="tokenizer.ggml.model = 'bert'"):
        Tokenizer.from_gguf(gguf_metadata(byte_tokenizer() | {"model": "bert"}))
    with pytest.raises(LoadError, match="damaged .*nothere"):
        Tokenizer.from_gguf(gguf_metadata(byte_tokenizer() | {"merges": ["nothere either"]}))


def write_folder(folder, **settings):
    core = sentencepiece(add_space_prefix=False)
    core.save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_folder(tmp_path):
    folder = write_folder(
        tmp_path, bos_token={"content": "<s>"}, eos_token="</s>", add_bos_token=True, chat_template="{{ bos_token }}!"
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == 1
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>!"
    assert Tokenizer.from_folder(folder, eos_token_ids=(7, 8)).eos_token_ids == (7, 8)


def test_chat_templates_in_a_folder(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = write_folder(tmp_path, chat_template=named)
    assert Tokenizer.from_folder(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_template == "file"


def test_no_chat_template(tmp_path):
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_folder(write_folder(tmp_path)).render_chat([{"role": "user", "content": "x"}])


def test_post_processor_decides_where_the_settings_are_silent(tmp_path):
    from tokenizers import processors

    tokenizer = sentencepiece(add_space_prefix=False)
    tokenizer._core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    read = Tokenizer.from_folder(tmp_path)
    assert read.encode("<s>hello", add_special_tokens=True) == read.encode("hello", add_special_tokens=True)
    assert read.encode("hello", add_special_tokens=True)[0] == 1
    assert read.encode("hello")[0] != 1


def test_wrong_input():
    with pytest.raises(TypeError, match="expected a string, got bytes"):
        byte_level().encode(b"bytes")
