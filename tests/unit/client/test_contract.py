"""The contract suite against the fake server; tests/e2e runs it against the real one."""

import pytest

from microturn_client.testing import FakeServer
from support.client_contract import ClientContract


@pytest.fixture
def client():
    with FakeServer().client(timeout_s=20.0) as client:
        yield client


class TestContract(ClientContract):
    pass
