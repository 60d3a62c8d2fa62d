"""The contract of tools against the real server, whose model has SmolLM2's weights and a chat template as Qwen's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests.bench.tool_model import write_tool_model
from microturn_client import AsyncClient, Client
from support.blocking import blocking
from support.share import model_server
from support.tool_contract import REPORT, TOOLS, ToolContract, called_in, check_report, context_of


@pytest.fixture(scope="module")
def model_dir(smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_model(Path(smollm2_dir), tmp_path_factory.mktemp("with-tools"))


@pytest.fixture(scope="module")
def address(model_dir: Path) -> Iterator[str]:
    with model_server(str(model_dir)) as server:
        yield server.address


@pytest.fixture(params=["threads", "asyncio"])
def client(request: pytest.FixtureRequest, address: str) -> Iterator[Client]:
    with Client(address) if request.param == "threads" else blocking(lambda: AsyncClient(address)) as client:
        yield client


class TestToolContract(ToolContract):
    pass


def test_the_context_is_what_the_chat_template_makes_of_the_whole_talk(address: str, model_dir: Path) -> None:
    """Two results in a row, and an answer of the model's: the ids are those of the template rendered at once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    with Client(address) as client, client.session(tools=TOOLS, return_appended_ids=True) as session:
        call = called_in(session)
        session.tool_result(call, "one", max_tokens=0).wait()
        session.tool_result(call, "two", max_tokens=8).wait()
        context = context_of(session)
        answer = tokenizer.decode(session.transcript[1].answer_ids)
        chat = [("user", "How warm is it in Bern?"), ("assistant", answer), ("tool", "one"), ("tool", "two")]
        messages = [{"role": role, "content": content} for role, content in chat]
        expected = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)["input_ids"]
        assert context[: len(expected)] == expected
        assert len(context) - len(expected) <= 8


def test_beside_a_format_the_model_chooses_whether_it_calls(address: str, model_dir: Path) -> None:
    """The format held from the first token, whatever the model would have begun: so no agent with both ever acted."""
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(model_dir).get_vocab()
    likes = {mark: {at: 30 for token, at in vocabulary.items() if token.startswith(mark)} for mark in "<{"}
    with Client(address) as client, client.session(tools=TOOLS) as session:
        asked = {"json_schema": REPORT, "max_tokens": 120}
        called = session.ask("How warm is it in Bern?", logit_bias=likes["<"], **asked).collect()
        assert called.tool_calls[0].arguments is not None
        assert called.text.strip() == ""
        said = session.tool_result(called.tool_calls[0], "21 degrees", logit_bias=likes["{"], **asked).collect()
        assert (said.status.finish_reason, said.tool_calls) == ("complete", ())
        check_report(said.text)
