"""A model with its tokenizer: text in, text out."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax import contexts
from kvec_jax.arguments import check_count
from kvec_jax.cache import CompressedKV
from kvec_jax.checks import check_choosing, check_policy
from kvec_jax.contexts import Context
from kvec_jax.decoding import advance, begin
from kvec_jax.errors import UnsupportedError
from kvec_jax.forms import Driven
from kvec_jax.generate import check_key, end_tokens, read_prompts, room_maker
from kvec_jax.identity import ModelIdentity, identity_of
from kvec_jax.implementations import Implementations, resolve
from kvec_jax.limits import Limits, check_limits, check_positions
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Transformer
from kvec_jax.placement import place_rows, whole
from kvec_jax.policies import FullCache, Policy
from kvec_jax.policies.prepared import prepare
from kvec_jax.running import Output, Run, Stats, bucket, listeners, pad_prompts, round_up
from kvec_jax.sampling import Greedy, Sampler
from kvec_jax.spread import on_mesh
from kvec_jax.typing import Array, Implementation


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder and its tokenizer; see ``load``.

    Attributes:
        model: The decoder, for ``prefill``, ``extend``, ``decode`` and ``generate``.
        tokenizer: ``encode``, ``decode`` and ``render_chat``.
        name: What was loaded.
    """

    model: Transformer
    tokenizer: Any
    name: str = "model"

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, {self.model.dtype})"

    @property
    def config(self) -> ModelConfig:
        """Shape and features of the model."""
        return self.model.config

    @functools.cached_property
    def identity(self) -> ModelIdentity:
        """What tells this model from others, so that a ``Context`` is not used with another."""
        return identity_of(self.model, self.name)

    def encode(self, prompt: str | Sequence[dict]) -> list[int]:
        """Token ids of a prompt: a string as it is, or chat messages through the model's chat template.

        Raises:
            TypeError: For anything else.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        if _is_chat(prompt):
            return self.tokenizer.encode(self.tokenizer.render_chat(prompt))
        raise TypeError(f"prompt: expected a string or messages with 'role' and 'content', got {prompt!r}")

    def generate(
        self,
        prompt: str | Sequence,
        policy: Policy | Driven = FullCache(),  # noqa: B008 - immutable
        *,
        max_new_tokens: int = 64,
        sampler: Sampler = Greedy(),  # noqa: B008 - immutable
        key: Array | None = None,
        stream: Callable[..., None] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        chunk: int | None = None,
        tail: int | None = None,
        cache_dtype: str | None = None,
        rerotate: bool = False,
        implementation: Implementation | Implementations = None,
    ) -> Output | list[Output]:
        """Reads a prompt, keeps what the policy chooses of its cache, and generates.

        Prompts are padded to one of a few lengths, so that another prompt of about the same length runs at once,
        without compiling again.

        Args:
            prompt: A string (taken as it is), chat messages (a list of ``{"role": ..., "content": ...}``), or a list of
                either: a batch, of any lengths.
            policy: What to keep.
            max_new_tokens: Most tokens to generate.
            sampler: ``Greedy()`` or ``Sample(...)``.
            key: Random key for ``Sample``.
            stream: Called with each new piece of text as it comes: ``stream(text)``, or ``stream(row, text)`` for a
                batch.
            eos_token_ids: Tokens that end a generation; ``None`` means the model's own.
            chunk: Tokens of the prompt to read at a time, where its keys don't fit the memory; see ``prefill``.
            tail: Generated tokens to hold beside what was kept, so that memory doesn't grow with the text; see
                ``kvec_jax.generate``.
            cache_dtype: ``"int8"`` or ``"int4"``: how kept rows are stored; see ``kvec_jax.prefill``.
            rerotate: Whether kept entries move to the first positions, so that with ``chunk`` and ``tail`` prompt and
                text may be longer than the model's context; see ``kvec_jax.prefill``.
            implementation: How operations are carried out, see ``prefill``.

        Returns:
            An ``Output``, or a list of them for a batch.

        Raises:
            TypeError, ValueError: For arguments that can't be, such as an empty prompt or batch, or a prompt beyond the
                model's context.
            UnsupportedError: If an implementation that was asked for by name can't do this.
        """
        if isinstance(policy, Driven):
            check_choosing(policy, self.model.mesh)
        else:
            check_policy(policy, self.model.mesh)
        check_count("max_new_tokens", max_new_tokens, 1)
        single = isinstance(prompt, str) or _is_chat(prompt)
        if not isinstance(prompt, Sequence):
            raise TypeError(f"prompt: expected a string, chat messages, or a list of either, got {prompt!r}")
        ids = [self.encode(p) for p in ([prompt] if single else prompt)]
        key = check_key(sampler, key, len(ids))
        ends = end_tokens(self.model, eos_token_ids)
        asked = dict(chunk=chunk, tail=tail, cache_dtype=cache_dtype, rerotate=rerotate)
        limits = check_limits(policy, self.config, **asked)
        self._check_lengths(ids, max_new_tokens, policy, limits)
        tokens, lengths = pad_prompts(ids, None if limits.rerotate else self.config.max_position_embeddings)
        hears = listeners(self.tokenizer, stream, single, len(ids), ends)
        if isinstance(policy, Driven):
            if implementation not in (None, "xla"):
                raise UnsupportedError(f"implementation: {policy.name!r} has plain XLA only, got {implementation!r}")
            settings = dict(sampler=sampler, key=key, max_new_tokens=max_new_tokens, ends=ends, listeners=hears)
            outputs = policy.write_text(self, tokens, lengths, **settings)
            return outputs[0] if single else outputs
        run = Run()
        prepared = prepare(policy, self.model)
        *placed, key = place_rows(self.model.mesh, tokens=tokens, lengths=lengths, key=key)
        inputs = self.model, prepared, *placed
        how = resolve(implementation, self.model)
        first = run.compile(_start, *inputs, policy, sampler, key, round_up(max_new_tokens, 64), ends, how, limits)
        state = run.read(first, *inputs, sampler, key)
        until = jnp.int32(0)
        more = run.compile(_continue, self.model, prepared, state, sampler, key, until, policy, ends, how, limits)
        state = run.decode(
            lambda state, until: more(self.model, prepared, state, sampler, key, until), state, max_new_tokens, hears
        )
        outputs = run.outputs(self.tokenizer, state, ends, self._costs(state.cache, lengths, tokens.shape[1]))
        return outputs[0] if single else outputs

    def compress(
        self,
        document: str | Sequence[dict],
        policy: Policy,
        *,
        chat: bool | None = None,
        chunk: int | None = None,
        cache_dtype: str | None = None,
        rerotate: bool = False,
        implementation: Implementation | Implementations = None,
    ) -> Context:
        """Reads a document once, and keeps what the policy chooses of its cache, to be asked about later.

        The questions are not known yet: policies that choose by the end of the prompt see that of the document.

        Args:
            document: A string, or chat messages of which the last is the user's and is the document (a system prompt
                may come first).
            policy: What to keep.
            chat: Whether the document begins a user's turn of a chat, which the question ends; ``None`` means that it
                does where the model has a chat template.
            chunk: Tokens to read at a time, see ``kvec_jax.prefill``.
            cache_dtype: ``"int8"`` or ``"int4"``: how kept rows are stored; see ``kvec_jax.prefill``.
            rerotate: Whether kept entries move to the first positions, so that with ``chunk`` the document may be
                longer than the model's context; see ``kvec_jax.prefill``.
            implementation: How operations are carried out, see ``prefill``.

        Returns:
            The context, for ``ask``, ``extend`` and ``Context.save``.

        Raises:
            TypeError, ValueError: For arguments that can't be, such as a document beyond the model's context.
        """
        settings = dict(chunk=chunk, cache_dtype=cache_dtype, rerotate=rerotate, implementation=implementation)
        return contexts.compress(self, document, policy, chat, **settings)

    def extend(
        self,
        context: Context,
        turn: str | Sequence[dict],
        *,
        implementation: Implementation | Implementations = None,
    ) -> Context:
        """Adds to a context: more of the document, or questions with their answers. What is added is kept whole.

        Args:
            context: Of this model; it stays as it is.
            turn: A string, which is read as more of the document; or messages of user and assistant in turn, such as a
                question that was asked and its answer. Questions that come next are asked after it.
            implementation: How operations are carried out, see ``prefill``.

        Returns:
            A new context, which shares the memory of what was kept with the old one.

        Raises:
            TypeError, ValueError: For a turn that can't be, or a context of another model.
        """
        return contexts.extend_context(self, context, turn, implementation)

    def ask(
        self,
        context: Context,
        question: str | Sequence[str],
        *,
        max_new_tokens: int = 64,
        sampler: Sampler = Greedy(),  # noqa: B008 - immutable
        key: Array | None = None,
        stream: Callable[..., None] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        implementation: Implementation | Implementations = None,
    ) -> Output | list[Output]:
        """Answers questions from a context: all as one batch, each as if it were the only one.

        The questions share what was kept of the document: it is in memory once, however many there are. What was added
        by ``extend`` is copied for each.

        Args:
            context: Of this model; it stays as it is.
            question: A string, or a list of them, of any lengths.
            max_new_tokens: Most tokens to generate for each.
            sampler: ``Greedy()`` or ``Sample(...)``.
            key: Random key for ``Sample``: one, or one per question.
            stream: Called with each new piece of text as it comes: ``stream(text)``, or ``stream(number, text)`` for a
                list.
            eos_token_ids: Tokens that end an answer; ``None`` means the model's own.
            implementation: How operations are carried out, see ``prefill``.

        Returns:
            An ``Output``, or a list of them.

        Raises:
            TypeError, ValueError: For arguments that can't be, or a context of another model.
        """
        settings = max_new_tokens, sampler, key, stream, eos_token_ids, implementation
        return contexts.ask(self, context, question, *settings)

    def _check_lengths(self, ids: list[list[int]], max_new_tokens: int, policy, limits: Limits) -> None:
        if not ids:
            raise ValueError("prompt: expected at least one prompt, got an empty list")
        for i, row in enumerate(ids):
            if not row:
                raise ValueError(f"prompt: expected at least one token, got an empty prompt (number {i})")
            name = "prompt" if len(ids) == 1 else f"prompt (number {i})"
            check_positions(name, limits, policy, self.config, len(row), max_new_tokens)

    def _costs(self, cache: CompressedKV, lengths: np.ndarray, padded: int) -> list[dict]:
        kept = whole(cache.counts).sum(axis=(1, 2))
        moved = np.zeros(len(lengths)) if cache.beyond is None else np.asarray(cache.beyond.moved_nbytes)
        config = self.config
        return [
            dict(
                prompt_tokens=length,
                kept=entries,
                total=length * config.num_hidden_layers * config.num_key_value_heads,
                cache_bytes=cache.pool_nbytes // len(lengths),
                full_cache_bytes=config.kv_bytes(padded, cache.tail_keys.dtype.itemsize),
                host_bytes=cache.host_nbytes // len(lengths),
                moved_bytes=int(brought),
            )
            for length, entries, brought in zip(lengths.tolist(), kept.tolist(), moved.tolist(), strict=True)
        ]


@functools.partial(jax.jit, static_argnames=("policy", "capacity", "eos_token_ids", "how", "limits"))
@on_mesh
def _start(model, prepared, tokens, lengths, policy, sampler, key, capacity, eos_token_ids, how, limits):
    logits, cache = read_prompts(model, prepared, tokens, lengths, policy, capacity, how, limits)
    return begin(cache, logits, sampler, key, capacity, eos_token_ids)


@functools.partial(jax.jit, static_argnames=("policy", "eos_token_ids", "how", "limits"), donate_argnames="state")
@on_mesh
def _continue(model, prepared, state, sampler, key, until, policy, eos_token_ids, how, limits):
    room = room_maker(model, prepared, policy, how, limits)
    return advance(model, state, sampler, key, until, eos_token_ids, how, room)


def _is_chat(prompt) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(m, dict) for m in prompt)


def load(name_or_path: str | os.PathLike, *, dtype=None, **options) -> LanguageModel:
    """Loads a model with its tokenizer.

    Args:
        name_or_path: A known name (``"smollm2-135m"``), a Hugging Face hub id, a folder with ``config.json`` and
            safetensors, or a ``.gguf`` file.
        dtype: ``"float32"`` or ``"bfloat16"``; ``None`` means float32 on CPU and bfloat16 elsewhere.
        **options: As in ``kvec_jax.models.load.load_model``: ``revision``, ``token``, ``max_context``, ``mesh``.

    Returns:
        The model.

    Raises:
        LoadError, UnsupportedError, TypeError, ValueError: If it can't be found, read, or run here.
    """
    from kvec_jax.models.load import load_model

    loaded = load_model(name_or_path, dtype=dtype, **options)
    return LanguageModel(loaded.model, loaded.tokenizer, loaded.name)


__all__ = ["CompressedKV", "LanguageModel", "Output", "Stats", "bucket", "load", "pad_prompts"]
