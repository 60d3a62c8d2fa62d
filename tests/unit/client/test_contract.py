"""The contract suites against the fake server, for threads and for asyncio; tests/e2e runs them against real ones."""

import pytest

from microturn_client.testing import FakeServer
from support.blocking import blocking
from support.client_contract import ClientContract
from support.tool_contract import ToolContract


@pytest.fixture(params=["threads", "asyncio"])
def client(request):
    server = FakeServer()
    if request.param == "threads":
        with server.client(timeout_s=20.0) as client:
            yield client
    else:
        with blocking(lambda: server.async_client(timeout_s=20.0)) as client:
            yield client


class TestContract(ClientContract):
    pass


class TestToolContract(ToolContract):
    pass
