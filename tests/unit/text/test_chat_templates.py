import datetime
from types import SimpleNamespace

import pytest

from microturn.errors import InvalidArgument
from microturn.text import chat_templates
from microturn.text.chat_templates import NO_TOOLS, ChatTemplates, tools_as_json
from support.text_edge import TextEdge

TODAY = """{% for message in messages %}{% if loop.first %}Today is {{ strftime_now('%d %B') }}.
{% endif %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"""


@pytest.fixture
def with_tools(load_edge) -> TextEdge:
    return load_edge("with_tools")


def test_a_template_is_learnt_once(with_tools: TextEdge) -> None:
    templates = ChatTemplates(with_tools.oracle)
    assert templates.with_tools(NO_TOOLS) is templates.with_tools(tools_as_json([]))


def test_templates_with_tools_are_kept_in_bounds(with_tools: TextEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "_MAX_NUM_KEPT", 2)
    templates = ChatTemplates(with_tools.oracle)
    one, two, three = (tools_as_json([{"name": name}]) for name in ("one", "two", "three"))
    first, second = templates.with_tools(one), templates.with_tools(two)
    assert templates.with_tools(one) is first
    templates.with_tools(three)
    assert templates.with_tools(one) is first
    assert templates.with_tools(two) is not second


def test_tools_that_look_like_the_learners_own_words_do_no_harm(with_tools: TextEdge) -> None:
    tools = [{"name": "said", "description": "said0. saidx1. saidxx"}]
    template = ChatTemplates(with_tools.oracle).with_tools(tools_as_json(tools))
    text = template.transition(None, "user", is_context_empty=True).text
    assert text == with_tools.oracle.apply_chat_template(
        [{"role": "user", "content": ""}], tools=tools, tokenize=False
    ).removesuffix("<|end|>\n")


def test_tools_without_a_place_are_refused(load_edge) -> None:
    with pytest.raises(InvalidArgument, match="no place for tools"):
        ChatTemplates(load_edge("smollm2").oracle).with_tools(tools_as_json([{"name": "x"}]))


def test_the_date_is_todays(with_tools: TextEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server runs for weeks; the template's first line must not stay at the day of its start."""
    tokenizer = type(with_tools.oracle).from_pretrained(with_tools.oracle.name_or_path)
    tokenizer.chat_template = TODAY
    templates = ChatTemplates(tokenizer)
    learnt = templates.with_tools(NO_TOOLS)
    assert templates.with_tools(NO_TOOLS) is learnt
    tomorrow = datetime.date.today() + datetime.timedelta(days=1)
    monkeypatch.setattr(chat_templates, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: tomorrow)))
    assert templates.with_tools(NO_TOOLS) is not learnt
