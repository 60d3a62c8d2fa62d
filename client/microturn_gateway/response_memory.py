"""What a client can go on from, and who has the sessions of its responses."""

from __future__ import annotations

import secrets

from microturn_gateway.caller import Caller
from microturn_gateway.response_request import ResponseRequest
from microturn_gateway.response_store import ResponseStore, StoredResponse


class CallerMemory:
    """The stored responses of a caller.

    Args:
        store: has them.
        caller: whose they are.
    """

    def __init__(self, store: ResponseStore, caller: bytes) -> None:
        self.caller = caller
        self._store = store

    def owner(self, _asked: ResponseRequest) -> Caller:
        """Whose sessions a request is answered on."""
        return Caller(self.caller)

    def keeps(self, asked: ResponseRequest) -> bool:
        """Whether the next request may go on from the response to this one."""
        return asked.is_stored

    def find(self, response_id: str) -> StoredResponse | None:
        """The response of this id; None where there is none."""
        return self._store.find(response_id, self.caller)

    def find_with(self, item_id: str) -> StoredResponse | None:
        """The response that has this item; None where there is none."""
        return self._store.find_with(item_id, self.caller)

    def keep(self, response: StoredResponse) -> None:
        """Remembers a response, if it is to be stored."""
        if response.is_stored:
            self._store.keep(response)


class ConnectionMemory(CallerMemory):
    """Besides, the latest response of a connection, stored or not, for as long as the connection lasts.

    Attributes:
        key: the connection's own: what is not stored is said on sessions that no other request finds.
        latest: response; None before the first.
    """

    def __init__(self, store: ResponseStore, caller: bytes) -> None:
        super().__init__(store, caller)
        self.key = secrets.token_bytes()
        self.latest: StoredResponse | None = None

    def owner(self, asked: ResponseRequest) -> Caller:
        """Whose sessions a request is answered on."""
        return Caller(self.caller, b"" if asked.is_stored else self.key)

    def keeps(self, _asked: ResponseRequest) -> bool:
        """The next request may always go on."""
        return True

    def find(self, response_id: str) -> StoredResponse | None:
        """The response of this id; None where there is none."""
        if self.latest is not None and self.latest.id == response_id:
            return self.latest
        return super().find(response_id)

    def find_with(self, item_id: str) -> StoredResponse | None:
        """The response that has this item; None where there is none."""
        if self.latest is not None and any(item["id"] == item_id for item in self.latest.output):
            return self.latest
        return super().find_with(item_id)

    def keep(self, response: StoredResponse) -> None:
        """Remembers a response."""
        self.latest = response
        super().keep(response)

    def forget(self, response_id: object) -> None:
        """The latest response cannot be gone on from any more, if it is this one."""
        if self.latest is not None and self.latest.id == response_id:
            self.latest = None
