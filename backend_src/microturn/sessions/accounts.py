"""What sessions take, over all tiers: KV and recurrent states, wherever they are, and the inputs that are kept, as ids,
embeddings and text that has no ids yet.

A session is charged for what its next token needs: KV that is nowhere at present comes back with its next turn. What it
shares with others counts in full, and of recurrent states as many as it keeps at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from microturn.errors import ResourceExhausted
from microturn.sessions.session import Session

ID_BYTES = 4
_FLOAT_BYTES = 4
_MAX_CHAR_BYTES = 4


def _no_states(_num_tokens: int) -> int:
    return 0


@dataclass(frozen=True)
class ByteLimits:
    """What sessions may take; 0 is as much as they like.

    Attributes:
        kv_bytes: of one token, in all layers.
        page_size: tokens that KV is counted in.
        of_session: bytes of one session.
        of_tenant: bytes of all sessions of a tenant; those for which no proxy names one are one tenant's.
        state_bytes: of recurrent states, given the tokens of a session.
    """

    kv_bytes: int = 0
    page_size: int = 1
    of_session: int = 0
    of_tenant: int = 0
    state_bytes: Callable[[int], int] = _no_states

    @classmethod
    def of(
        cls,
        *,
        of_session: int,
        of_tenant: int,
        page_bytes: int,
        page_size: int,
        max_context: int,
        hidden_size: int,
        more: int,
        state_bytes: Callable[[int], int] = _no_states,
    ) -> ByteLimits:
        """The limits that settings ask for.

        Args:
            of_session: 0 is what the longest context takes that was told in embeddings alone, and `more`.
            of_tenant: see above.
            page_bytes: KV of a page of tokens, in all layers.
            page_size: tokens in a page.
            max_context: tokens that a session may hold at most.
            hidden_size: of the model.
            more: what a session may keep besides.
            state_bytes: see above.
        """
        num_pages = -(-max_context // page_size)
        longest = num_pages * page_bytes + max_context * (ID_BYTES + _FLOAT_BYTES * hidden_size)
        longest += state_bytes(max_context)
        return cls(page_bytes // page_size, page_size, of_session or longest + more, of_tenant, state_bytes)


class Accounts:
    """Bytes that living sessions take, by session and by tenant.

    Args:
        limits: of these.
    """

    def __init__(self, limits: ByteLimits) -> None:
        self.limits = limits
        self._charged: dict[Session, int] = {}
        self._of_tenant: Counter[str | None] = Counter()

    def bytes_of(self, session: Session, num_new: int = 0) -> int:
        """What a session takes once it has so many tokens more."""
        num_kept = len(session.context) - session.num_dropped + num_new
        num_pages = -(-num_kept // self.limits.page_size)
        kv_bytes = num_pages * self.limits.page_size * self.limits.kv_bytes + self.limits.state_bytes(num_kept)
        held_bytes = session.codec.num_held * _MAX_CHAR_BYTES
        return kv_bytes + session.context.num_bytes + held_bytes + num_new * ID_BYTES

    def of_tenant(self, tenant: str | None) -> int:
        """What all sessions of a tenant take."""
        return self._of_tenant[tenant]

    def check(self, session: Session, num_new: int, *, replaced: Session | None = None) -> None:
        """Checks that a session may have so many tokens more.

        Args:
            session: its context holds what its turn brings.
            num_new: tokens that the turn generates at most.
            replaced: a session that ends when this one begins.

        Raises:
            ResourceExhausted: it, or its tenant, would take too much.
        """
        num_bytes = self.bytes_of(session, num_new)
        if 0 < self.limits.of_session < num_bytes:
            raise ResourceExhausted(
                f"the session would take {num_bytes} bytes of KV and inputs, and max_session_bytes is "
                f"{self.limits.of_session}: rewind, or open a session that keeps less (overflow=window, "
                "history=bounded)"
            )
        if not self.limits.of_tenant:
            return
        others = self.of_tenant(session.tenant) - self._charged.get(session, 0)
        if replaced is not None and replaced.tenant == session.tenant:
            others -= self._charged.get(replaced, 0)
        if others + num_bytes > self.limits.of_tenant:
            whose = "all sessions" if session.tenant is None else "this tenant's sessions"
            raise ResourceExhausted(
                f"{whose} would take {others + num_bytes} bytes of KV and inputs, and max_tenant_bytes is "
                f"{self.limits.of_tenant}: close a session or try again",
                retry_after_ms=1000,
            )

    def charge(self, session: Session, num_new: int = 0) -> None:
        """Counts what a session takes, with so many tokens that are to come."""
        num_bytes = self.bytes_of(session, num_new)
        self._of_tenant[session.tenant] += num_bytes - self._charged.get(session, 0)
        self._charged[session] = num_bytes

    def close(self, session: Session) -> None:
        """A session takes nothing any more."""
        self._of_tenant[session.tenant] -= self._charged.pop(session, 0)
        if not self._of_tenant[session.tenant]:
            del self._of_tenant[session.tenant]

    def check_integrity(self) -> None:
        """Asserts that tenants take what their sessions take."""
        counted: Counter[str | None] = Counter()
        for session, num_bytes in self._charged.items():
            counted[session.tenant] += num_bytes
        assert counted == +self._of_tenant, "bytes of tenants are counted wrong"
