"""Chat templates as published models write them, and messages that make no sense."""

import json

import pytest

from kvec_jax.models.chat import render_chat

TURNS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "  {% if m.role == 'user' %}\n<{{ m.content }}>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def test_blocks_leave_no_lines_behind():
    assert render_chat(TURNS, [user("a"), user("b")]) == "<a><b>:"
    assert render_chat(TURNS, [user("a")], add_generation_prompt=False) == "<a>"


def test_tokens_variables_and_json():
    template = "{{ bos_token }}{{ tools | tojson }}{{ strftime_now('%Y')[:2] }}{{ eos_token }}"
    tools = [{"name": "añ<b>"}]
    got = render_chat(template, [user("x")], bos_token="<s>", eos_token="</s>", tools=tools)
    assert got == "<s>" + json.dumps(tools, ensure_ascii=False) + "20</s>"


def test_loop_controls_and_generation_blocks():
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render_chat(template, [user("a"), user("b")]) == "a"


def test_refusal_of_the_template():
    with pytest.raises(ValueError, match="no tools here"):
        render_chat(TURNS, [{"role": "tool", "content": "x"}])


def test_a_template_for_text_alone_says_which_message_has_more():
    parts = [{"type": "text", "text": "hello"}]
    with pytest.raises(ValueError, match=r"can't render these messages: .*; messages\[1\]: 'content' is of type list"):
        render_chat("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", [user("a"), user(parts)])


def test_template_that_is_no_template():
    with pytest.raises(ValueError, match="can't render"):
        render_chat("{% for %}", [user("a")])


def test_the_sandbox_holds():
    with pytest.raises(ValueError, match="unsafe"):
        render_chat("{{ messages.__class__.__mro__ }}", [user("a")])
    with pytest.raises(ValueError, match="can't render"):
        render_chat("{{ messages.append(1) }}", [user("a")])


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "expected at least one message"),
        ("hello", "expected a list of messages, got str"),
        ({"role": "user"}, "expected a list of messages, got dict"),
        (["hello"], r"messages\[0\]: expected a mapping"),
        ([user("a"), {"content": "b"}], r"messages\[1\]: expected a mapping with 'role'"),
        ([{"role": "user"}], r"messages\[0\]: the user message has no 'content'"),
    ],
)
def test_wrong_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        render_chat(TURNS, messages)
