"""The contract suite against the real server; tests/unit/client runs it against the fake one."""

from __future__ import annotations

from support.client_contract import ClientContract


class TestContract(ClientContract):
    pass
