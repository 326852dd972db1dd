"""Chat templates: the Jinja programs that models publish, run in Jinja's sandbox."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence


def render_chat(
    template: str,
    messages: Sequence[Mapping],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **variables,
) -> str:
    """The prompt that ``template`` makes of ``messages``.

    Args:
        template: Jinja source, as published with the model.
        messages: Each with ``role`` and ``content``.
        add_generation_prompt: Whether the prompt ends where the assistant begins to speak.
        bos_token: The template's variable of this name, a token as it is written.
        eos_token: The same.
        **variables: Further ones, such as ``tools`` or ``enable_thinking``.

    Returns:
        The prompt; encode it without adding special tokens, it holds them.

    Raises:
        ValueError: When there are no messages, one lacks its role or content, or the template refuses them.

    Example:
        >>> render_chat("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        ...             [{"role": "user", "content": "hello"}])
        '<user>hello'
    """
    import jinja2

    _check(messages)
    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            **{"tools": None, "documents": None, **variables},
        )
    except (jinja2.TemplateError, TypeError) as error:  # a TypeError where a template takes a part for a text
        parts = [f"; messages[{i}]: {_kind(message)}" for i, message in enumerate(messages) if _kind(message)]
        raise ValueError(f"the chat template can't render these messages: {error}{''.join(parts[:1])}") from error


def _check(messages) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages: expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: expected at least one message, got none")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"messages[{i}]: expected a mapping with 'role' and 'content', got {message!r}")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"messages[{i}]: the {message['role']} message has no 'content'")
        if not isinstance(message.get("content"), str | Sequence | None):
            raise ValueError(f"messages[{i}]: expected a text as 'content', got {message['content']!r}")


def _kind(message: Mapping) -> str:
    """What a template for plain text may not know; nothing where there is only that."""
    for name in ("role", "content"):
        if name in message and not isinstance(message[name], str):
            return f"{name!r} is of type {type(message[name]).__name__}, which not every model's template takes"
    return ""


@functools.lru_cache(maxsize=16)
def _compile(template: str):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_block()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_now)
    return environment.from_string(template)


@functools.cache
def _generation_block():
    """An extension for ``{% generation %}``, which marks what the assistant said for training: its body is kept."""
    import jinja2.ext

    class GenerationBlock(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlock


def _to_json(value, indent=None, separators=None, sort_keys=False, ensure_ascii=False) -> str:
    """JSON for a prompt: Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    import jinja2

    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


__all__ = ["render_chat"]
