"""What must hold whatever happens, beside what the oracle says of contexts and answers.

Looked at after each event: an engine that has turns to compute and nothing on its way does not wait; a session whose
window slides keeps no more than fits. Looked at every second: Triton's slots belong to sessions, or wait in a small
number for who comes back; no START waits for one; what a client does not read stays bounded.
"""

from __future__ import annotations

from simulation.backend import Backend
from simulation.batcher import SequenceId
from simulation.server import Server
from simulation.triton import Triton
from simulation.world import Broken, World
from support.fake_runner import HIDDEN_SIZE

_LOOK_S = 1.0

# A client that does not read makes so many responses wait that cost nothing, then so many more a second, and so many
# with each that cost a forward pass.
_MOST_FREE = 130
_MOST_FREE_PER_S = 11.0
_MOST_FREE_PER_PAID = 17

# Of an embedding in the model that is a hash, with its id.
_TOKEN_BYTES = 4 * HIDDEN_SIZE + 4


class Invariants:
    """Looks at the servers.

    Args:
        world: the clock; it calls `check`.
        servers: all of them.
    """

    def __init__(self, world: World, servers: list[Server]) -> None:
        self._world = world
        self._servers = servers
        # Those that had a slot for nobody when somebody looked last, of each life of a server.
        self._idle_before: dict[Triton, set[SequenceId]] = {}
        self._backlog_before: dict[Triton, set[SequenceId]] = {}
        world.checks.append(self.check)
        world.after(_LOOK_S, self._look)

    def check(self) -> None:
        """Looks at what has been touched."""
        for server in self._servers:
            backend = server.backend
            if backend is None or not backend.is_alive or not backend.is_touched or backend.engine._is_stopping:
                continue
            backend.is_touched = False
            backend.oracle.check()
            self._check_progress(backend)
            self._check_window(backend)

    def _check_progress(self, backend: Backend) -> None:
        """An engine that has turns and nothing on its way computes: it does not wait for somebody to come."""
        engine = backend.engine
        if not engine._lifecycle.running or not backend.is_waiting or backend.disk.num_jobs:
            return
        if not engine._tiers._is_under_way:
            ids = [session.id for session in engine._lifecycle.running]
            raise Broken("progress", f"the engine waits, and so do the turns of {ids}")

    def _check_window(self, backend: Backend) -> None:
        """What a window has evicted for good is kept up to a limit only."""
        for session in backend.engine._sessions:
            if session.window is None or session.history_limit is None:
                continue
            most = session.history_limit + 2 * session.max_context * _TOKEN_BYTES
            if session.context.num_bytes > most:
                raise Broken("window", f"session {session.id} keeps {session.context.num_bytes} bytes, not {most}")

    # ---- every second --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for server in self._servers:
            if server.is_up and server.triton is not None and server.backend is not None:
                self._check_unread(server.triton)
                if not server.triton.is_frozen and server.triton.is_stub_alive:
                    self._check_slots(server, server.triton, server.backend)
        self._world.after(_LOOK_S, self._look)

    def _check_slots(self, server: Server, triton: Triton, backend: Backend) -> None:
        idle = {one.id for one in triton.batcher.slots if not one.queued and not backend.is_wanted(one.id)}
        lost = idle & self._idle_before.get(triton, set())
        self._idle_before[triton] = idle
        if len(lost) > max(1, server.drawn.num_slots // 8):
            raise Broken("slots", f"{len(lost)} of {server.drawn.num_slots} slots are held by nobody: {lost}")
        backlog = {one.id for one in triton.batcher.backlog}
        if stuck := backlog & self._backlog_before.get(triton, set()):
            raise Broken("slots", f"STARTs of {stuck} wait for a slot in silence")
        self._backlog_before[triton] = backlog

    def _check_unread(self, triton: Triton) -> None:
        num_paid = sum(stream.num_paid for stream in triton.streams)  # one client may have several
        for stream in triton.streams:
            most = _MOST_FREE + _MOST_FREE_PER_S * (self._world.now_s - stream.opened_s)
            most = len(stream.clients) * most + _MOST_FREE_PER_PAID * num_paid
            if stream.num_unread_free > most:
                raise Broken("unread", f"{stream.num_unread_free} answers that cost nothing wait for a client")
