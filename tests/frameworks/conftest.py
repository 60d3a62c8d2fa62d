"""One gateway before the real server, for programs of all frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests.bench.tool_model import write_tool_model
from support.gateway import running_gateway
from support.share import IN_FLOAT32, model_server

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def base_url(smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a gateway whose model has a chat template with tools; it wants no token, and tells callers apart by theirs."""
    model_dir = write_tool_model(Path(smollm2_dir), tmp_path_factory.mktemp("with-tools"))
    with (
        model_server(str(model_dir), *IN_FLOAT32) as server,
        running_gateway(server.address, served_model_names=(MODEL,)) as address,
    ):
        yield f"http://{address}/v1"
