"""A document that is read and compressed once, and then asked any number of questions."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.arguments import check_count, check_flag
from kvec_jax.cache import CompressedKV
from kvec_jax.checks import check_policy, check_same_mesh
from kvec_jax.decoding import DecodeState, advance, begin
from kvec_jax.dialogue import BREAK, Frame, first_tokens, later_tokens
from kvec_jax.extend import extend, run_extend
from kvec_jax.generate import check_key, end_tokens
from kvec_jax.identity import ModelIdentity
from kvec_jax.implementations import Implementations, resolve
from kvec_jax.limits import check_limits, check_positions
from kvec_jax.placement import place_rows
from kvec_jax.policies import Policy
from kvec_jax.prefill import prefill
from kvec_jax.running import Output, Run, listeners, pad_prompts, round_up
from kvec_jax.sampling import Sampler
from kvec_jax.spread import on_mesh
from kvec_jax.typing import Array, Implementation

# What each question has of a cache; the rest, the pool, belongs to the context and is never copied.
_OWN = ("tail_keys", "tail_values", "tail_length", "next_position", "shift", "beyond")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """A document as the model remembers it; made by ``LanguageModel.compress``, never changed.

    Attributes:
        cache: One row: what is kept of the document, and in its tail the turns that were added.
        document_tokens: Of the document, with what the chat template puts before it.
        policy: What was kept, in words; for show.
        model: The model that read the document; no other can use the context.
        chat: Whether document and questions stand in a user's turn of a chat.
    """

    cache: CompressedKV
    document_tokens: int
    policy: str
    model: ModelIdentity
    chat: bool

    def __repr__(self) -> str:
        return (
            f"Context({self.tokens:,} tokens in {self.nbytes / 1e6:,.1f} MB, model={self.model.name!r}, {self.policy})"
        )

    @property
    def tokens(self) -> int:
        """Tokens read so far: the document and the turns that were added."""
        return int(self.cache.next_position[0])

    @property
    def nbytes(self) -> int:
        """Bytes that the context holds."""
        return self.cache.nbytes

    def save(self, path: str | os.PathLike) -> None:
        """Writes the context into one file, whole or not at all; ``load_context`` reads it.

        Raises:
            OSError: If it can't be written.
            UnsupportedError: For a cache of a form that no file holds.
        """
        from kvec_jax.context_file import save_context

        save_context(self, path)


def compress(lm, document: str | Sequence[dict], policy: Policy, chat: bool | None, **settings) -> Context:
    """``LanguageModel.compress``."""
    check_policy(policy)
    chat = lm.tokenizer.chat_template is not None if chat is None else chat
    check_flag("chat", chat)
    ids = _document_tokens(lm.tokenizer, document, chat)
    asked = {name: value for name, value in settings.items() if name != "implementation"}
    limits = check_limits(policy, lm.config, **asked)
    check_positions("document", limits, policy, lm.config, len(ids), 2)  # and one of a question
    context = None if limits.rerotate else lm.config.max_position_embeddings
    _, cache = prefill(lm.model, *pad_prompts([ids], context), policy, **settings)
    return Context(cache=cache, document_tokens=len(ids), policy=repr(policy), model=lm.identity, chat=chat)


def extend_context(lm, context: Context, turn: str | Sequence[dict], implementation) -> Context:
    """``LanguageModel.extend``."""
    _check(lm, context)
    ids = later_tokens(lm.tokenizer, _turn_text(lm.tokenizer, context, turn))
    tokens, lengths = pad_prompts([ids], lm.config.max_position_embeddings)
    cache = context.cache.reserve(round_up(len(ids), 64))
    _, cache = extend(lm.model, cache, tokens, lengths, implementation=implementation)
    return dataclasses.replace(context, cache=cache)


def ask(
    lm,
    context: Context,
    questions: str | Sequence[str],
    max_new_tokens: int,
    sampler: Sampler,
    key: Array | None,
    stream: Callable[..., None] | None,
    eos_token_ids: Sequence[int] | None,
    implementation: Implementation | Implementations,
) -> Output | list[Output]:
    """``LanguageModel.ask``."""
    _check(lm, context)
    check_count("max_new_tokens", max_new_tokens, 1)
    single = isinstance(questions, str)
    ids = _question_tokens(lm.tokenizer, context, [questions] if single else questions)
    _check_room(lm, context, ids, max_new_tokens)
    tokens, lengths = pad_prompts(ids, lm.config.max_position_embeddings)
    key, ends = check_key(sampler, key, len(ids)), end_tokens(lm.model, eos_token_ids)
    hears = listeners(lm.tokenizer, stream, single, len(ids), ends)
    how = resolve(implementation, lm.model)
    run = Run()
    *placed, key = place_rows(lm.model.mesh, tokens=tokens, lengths=lengths, key=key)
    inputs = lm.model, context.cache, *placed, sampler, key
    first = run.compile(_begin, *inputs, round_up(max_new_tokens, 64), ends, how)
    state = run.read(first, *inputs)
    more = run.compile(_go_on, lm.model, context.cache, state, sampler, key, jnp.int32(0), ends, how)

    def go_on(state, until):
        return more(lm.model, context.cache, state, sampler, key, until)

    state = run.decode(go_on, state, max_new_tokens, hears)
    outputs = run.outputs(lm.tokenizer, state, ends, _costs(lm, context, lengths))
    return outputs[0] if single else outputs


@functools.partial(jax.jit, static_argnames=("capacity", "eos_token_ids", "how"))
@on_mesh
def _begin(model, cache, tokens, lengths, sampler, key, capacity, eos_token_ids, how) -> DecodeState:
    """The state after every question's first token; in place of a cache it has what is each question's own."""
    B, Q = tokens.shape
    room = [(0, 0)] * 3 + [(0, Q + capacity), (0, 0)]

    def tails(tail):
        return jnp.pad(jnp.repeat(tail, B, axis=1), room)

    beyond = None if cache.beyond is None else jax.tree.map(jnp.copy, cache.beyond.take_rows(jnp.zeros(B, jnp.int32)))
    cache = dataclasses.replace(
        cache,
        tail_keys=tails(cache.tail_keys),
        tail_values=tails(cache.tail_values),
        tail_length=jnp.repeat(cache.tail_length, B),
        next_position=jnp.repeat(cache.next_position, B),
        shift=None if cache.shift is None else jnp.repeat(cache.shift, B),
        beyond=beyond,
    )
    logits, cache = run_extend(model, cache, tokens, lengths, how=how)
    return _without_pool(begin(cache, logits, sampler, key, capacity, eos_token_ids))


@functools.partial(jax.jit, static_argnames=("eos_token_ids", "how"), donate_argnames="state")
@on_mesh
def _go_on(model, cache, state, sampler, key, until, eos_token_ids, how) -> DecodeState:
    state = dataclasses.replace(state, cache=dataclasses.replace(cache, **state.cache))
    return _without_pool(advance(model, state, sampler, key, until, eos_token_ids, how))


def _without_pool(state: DecodeState) -> DecodeState:
    """The state without what belongs to the context, so that its buffers may be donated."""
    return dataclasses.replace(state, cache={name: getattr(state.cache, name) for name in _OWN})


def _document_tokens(tokenizer, document: str | Sequence[dict], chat: bool) -> list[int]:
    earlier = ()
    if not isinstance(document, str):
        messages = isinstance(document, Sequence) and all(isinstance(message, dict) for message in document)
        if not messages or not document or document[-1].get("role") != "user" or not chat:
            raise TypeError(
                "document: expected a string or, in a chat, messages of which the last is the user's, "
                f"got {type(document).__name__}"
            )
        *earlier, last = document
        document = last.get("content")
    if not isinstance(document, str) or not document.strip():
        raise ValueError(f"document: expected a text, got {document!r}")
    before = Frame.of(tokenizer, earlier).before if chat else ""
    return first_tokens(tokenizer, before + document.rstrip() + BREAK, add_special_tokens=not chat)


def _question_tokens(tokenizer, context: Context, questions: Sequence[str]) -> list[list[int]]:
    if not isinstance(questions, Sequence):
        raise TypeError(f"question: expected a string or a list of them, got {questions!r}")
    if not questions:
        raise ValueError("question: expected at least one, got an empty list")
    for question in questions:
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"question: expected a text, got {question!r}")
    frame = Frame.of(tokenizer) if context.chat else Frame()
    return [later_tokens(tokenizer, question + frame.answer) for question in questions]


def _turn_text(tokenizer, context: Context, turn: str | Sequence[dict]) -> str:
    """The text of a turn, which ends where a question may follow."""
    if isinstance(turn, str) and turn.strip():
        return turn.rstrip() + BREAK
    roles = [m.get("role") for m in turn if isinstance(m, dict)] if isinstance(turn, Sequence) else []
    if not roles or roles != ["user", "assistant"] * (len(turn) // 2):
        raise ValueError(
            f"turn: expected a text, or messages of user and assistant in turn, the last the assistant's, got {turn!r}"
        )
    if not context.chat:
        raise ValueError("turn: this context is no chat; expected a text, got messages")
    frame = Frame.of(tokenizer)
    ends = {"user": frame.answer, "assistant": frame.again}
    return "".join(message["content"] + ends[message["role"]] for message in turn)


def _check(lm, context) -> None:
    if not isinstance(context, Context):
        raise TypeError(f"context: expected what compress or load_context gave, got {context!r}")
    context.model.check(lm.identity)
    check_same_mesh(lm.model, context.cache)


def _check_room(lm, context: Context, ids: list[list[int]], max_new_tokens: int) -> None:
    most = lm.config.max_position_embeddings
    held = int(context.cache.rope_position[0])
    needed = held + max(map(len, ids)) + max_new_tokens - 1
    if needed > most:
        raise ValueError(
            f"question: a context of {held} tokens, the question and {max_new_tokens} new ones are {needed}, "
            f"more than the model's context of {most}"
        )


def _costs(lm, context: Context, lengths: np.ndarray) -> list[dict[str, Any]]:
    config, cache = lm.config, context.cache
    heads = config.num_hidden_layers * config.num_key_value_heads
    shared = dict(
        kept=int(jnp.sum(cache.counts)),
        total=context.document_tokens * heads,
        cache_bytes=cache.pool_nbytes,
        full_cache_bytes=config.kv_bytes(context.document_tokens, cache.tail_keys.dtype.itemsize),
    )
    return [dict(prompt_tokens=context.tokens + length, **shared) for length in lengths.tolist()]
