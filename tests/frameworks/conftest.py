"""One gateway before the real server, for programs of all frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from microturn.serve.child import running_server
from support.gateway import running_gateway
from support.tool_model_dir import write_tool_model

MODEL = "smollm2-135m"
TOKEN = "a-token-for-these-tests"


@pytest.fixture(scope="session")
def endpoint(smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of OpenAI's SDK for a gateway whose model has a chat template with tools."""
    model_dir = write_tool_model(Path(smollm2_dir), tmp_path_factory.mktemp("with-tools"))
    with (
        running_server(str(model_dir), "weights=float32") as server,
        running_gateway(server, token=TOKEN, served_model_names=(MODEL,)) as address,
    ):
        yield {"OPENAI_BASE_URL": f"http://{address}/v1", "OPENAI_API_KEY": TOKEN}
