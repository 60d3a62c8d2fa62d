"""Templates of many habits, rendered by Jinja as transformers does it."""

import json
from functools import partial

import pytest
from jinja2 import Environment, TemplateError

from microturn.errors import InvalidArgument
from microturn.text.chat import ChatTemplate, Transition
from support import tiny_tokenizers as tiny

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def learn(source: str) -> ChatTemplate:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    template = environment.from_string(source)

    def fail(message: str) -> None:
        raise TemplateError(message)

    def render(messages: list[dict[str, str]], asks_for_answer: bool) -> str:
        return template.render(
            messages=messages,
            add_generation_prompt=asks_for_answer,
            bos_token="<s>",
            eos_token="</s>",
            raise_exception=fail,
        )

    return ChatTemplate(render, "<s>", "said")


def test_what_comes_between_messages() -> None:
    template = learn(CHATML)
    first = template.transition(None, "user", is_context_empty=True)
    assert first.text == "<|im_start|>user\n"
    assert not first.drops_space_after
    between = template.transition("user", "assistant", is_context_empty=False)
    assert between == Transition("<|im_end|>\n<|im_start|>assistant\n", False, False)
    assert template.transition("assistant", "tool", is_context_empty=False).text == "<|im_end|>\n<|im_start|>tool\n"
    assert template.answer_space == ""


def test_a_default_system_message_comes_when_none_is_given() -> None:
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    template = learn(default + CHATML)
    assert template.transition(None, "user", is_context_empty=True).text.startswith("<|im_start|>system\nBe kind.")
    assert template.transition(None, "system", is_context_empty=True).text == "<|im_start|>system\n"
    assert template.transition("system", "user", is_context_empty=False).text == "<|im_end|>\n<|im_start|>user\n"


def test_whitespace_that_the_template_trims() -> None:
    template = learn(tiny.TRIMMING)
    assert template.transition("user", "assistant", is_context_empty=False) == Transition(
        "<|end|><|head|>assistant<|/head|>\n\n", drops_space_before=True, drops_space_after=True
    )


def test_whitespace_may_be_trimmed_in_one_place_only() -> None:
    """Gemma puts the system message in front of the user's and trims both together."""
    template = learn(
        "{% set rules = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}"
        "<{{ m.role }}>{{ ((rules if loop.first else '') ~ m.content) | trim }}</>{% endfor %}"
    )
    assert not template.transition("system", "user", is_context_empty=False).drops_space_after
    assert template.transition("assistant", "user", is_context_empty=False).drops_space_after


def test_bos_is_left_out_behind_other_text() -> None:
    template = learn(tiny.TRIMMING)
    assert template.transition(None, "user", is_context_empty=True).text.startswith("<s><|head|>")
    assert template.transition(None, "user", is_context_empty=False).text.startswith("<|head|>")


def test_a_bos_that_begins_every_message_is_not_left_out() -> None:
    """SmolLM2's BOS is the token that begins each of its messages."""
    template = learn(CHATML.replace("<|im_start|>", "<s>"))
    assert template.transition(None, "user", is_context_empty=False).text == "<s>user\n"


def test_the_space_of_an_answer() -> None:
    assert learn(tiny.ALTERNATING).answer_space == " "
    asking_for_more = CHATML.replace("{% endif %}", "<think>\n{% endif %}")
    assert learn(asking_for_more).answer_space == ""


def test_a_message_that_waits_for_the_next_one() -> None:
    """A system message alone is not rendered; it comes with the user's first."""
    template = learn(tiny.ALTERNATING)
    assert template.transition(None, "system", is_context_empty=True).text == "<s>[INST] (("
    assert template.transition("system", "user", is_context_empty=False).text == "))\n\n"


def test_orders_that_the_template_refuses_are_refused_with_its_reason() -> None:
    template = learn(tiny.ALTERNATING)
    with pytest.raises(InvalidArgument, match=r"'assistant' begins a conversation.* take turns"):
        template.transition(None, "assistant", is_context_empty=True)
    with pytest.raises(InvalidArgument, match=r"'system' follows role 'user'.* in several ways"):
        template.transition("user", "system", is_context_empty=False)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (tiny.FORGETFUL, "changes what the message of role 'assistant' says"),
        (CHATML.replace("m.content }}", "m.content | upper }}"), "does not keep the message of role"),
        (CHATML.replace("m.content }}", "m.content | tojson }}"), "changes what the message of role"),
        (CHATML.replace("m.content }}", "m.content.strip('\\n') }}"), "changes what the message of role"),
        (CHATML.replace("m.content }}", "m.content ~ m.content }}"), "does not keep the message of role"),
        (CHATML.replace("messages %}", "messages | reverse %}"), "in several ways"),
        (CHATML.replace("messages %}", "messages[-2:] %}"), "does not keep the message of role 'assistant'"),
        (
            CHATML.replace("{{ m.role }}", "{{ m.role }}{{ loop.index }}"),
            "begins a message of role 'assistant' in several ways",
        ),
        (CHATML.replace("{{ m.role }}", "{{ m.role }}{{ '*' if loop.last }}"), "in several ways"),
        ("{{ raise_exception('images only') }}", "does not render a plain chat: images only"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(source: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        learn(source)


def test_results_of_tools_follow_each_other() -> None:
    """As Qwen's templates have it: results in a row are one message of the user's."""
    opens = "{% if m.role == 'tool' and (loop.first or loop.previtem.role != 'tool') %}<|im_start|>user\n{% endif %}"
    closes = "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{{ '\\n' }}{% else %}{{ '\\n' }}{% endif %}"
    source = CHATML.replace("{% for m in messages %}", "{% for m in messages %}{% if m.role == 'tool' %}" + opens)
    source = source.replace(opens, opens + "<r>{{ m.content }}</r>" + closes + "{% else %}")
    source = source.replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
    template = learn(source)

    def between(previous: str, role: str) -> str:
        return template.transition(previous, role, is_context_empty=False).text

    assert between("assistant", "tool") == "<|im_end|>\n<|im_start|>user\n<r>"
    assert between("tool", "tool") == "</r>\n<r>"
    assert between("tool", "assistant") == "</r><|im_end|>\n<|im_start|>assistant\n"


def test_results_of_tools_may_be_written_as_json() -> None:
    """As Llama 3.1 does."""
    template = learn(CHATML.replace("m.content }}", "(m.content | tojson) if m.role == 'tool' else m.content }}"))
    opens = template.transition("assistant", "tool", is_context_empty=False)
    assert opens == Transition('<|im_end|>\n<|im_start|>tool\n"', False, False, escapes=True)
    closes = template.transition("tool", "assistant", is_context_empty=False)
    assert closes == Transition('"<|im_end|>\n<|im_start|>assistant\n', False, False)
    assert template.escapes("tool")
    assert not template.escapes("user")


@pytest.mark.parametrize("content", ["m.content | trim | tojson", "m.content | replace('b', 'c')", "m.content[:20]"])
def test_a_role_that_is_rewritten_is_refused_alone(content: str) -> None:
    template = learn(CHATML.replace("m.content }}", f"({content}) if m.role == 'tool' else m.content }}}}"))
    assert template.transition("user", "assistant", is_context_empty=False).text
    with pytest.raises(InvalidArgument, match=r"'tool' follows role 'assistant'.* changes what the message"):
        template.transition("assistant", "tool", is_context_empty=False)
