"""The end of a run: everybody is answered, then everybody is silent, and then nothing is left of anybody."""

from __future__ import annotations

from collections.abc import Sequence

from microturn.sessions.session import Session
from microturn_client._lifecycle import SessionState
from simulation.backend import Backend
from simulation.containers import most_at, sizes_of
from simulation.library_person import LibraryPerson
from simulation.plan import Plan
from simulation.raw_person import RawPerson
from simulation.server import Server, server_of
from simulation.waiting import Waiting
from simulation.world import Broken, World

_TICK_S = 0.5


def check_ending(
    world: World, plan: Plan, servers: list[Server], people: Sequence[RawPerson | LibraryPerson], waiting: Waiting
) -> None:
    """Lets a run come to its end, and asserts what must hold then."""
    faults_end_s = world.now_s + max((fault.at_s + 2 * fault.for_s + 1.0 for fault in plan.faults), default=0.0)
    while not all(person.is_done for person in people) or len(waiting) or world.now_s < faults_end_s:
        world.run_until(world.now_s + _TICK_S)
    for person in people:
        if isinstance(person, LibraryPerson):
            _check_transcripts(person, servers)
    for person in people:
        person.finish()
    world.say("everybody has gone")
    world.run_until(world.now_s + max(21.0, plan.knobs.idle_timeout_s) + 2.0)
    for server in servers:
        assert server.backend is not None
        _check_left(server.backend)


def _check_transcripts(person: LibraryPerson, servers: list[Server]) -> None:
    """What the client library knows of a session is what the session holds."""
    for shell in person.shells:
        core = shell.core
        if core.lifecycle.state is not SessionState.OPEN or not core.transcript.is_replayable or list(core.outbox):
            continue
        backend = server_of(core.id, servers).backend
        session = None if backend is None else backend.engine._sessions.find(core.id)
        if session is None:
            continue
        held = [-1 if is_embedding else token for token, is_embedding in _tokens_of(session)]
        known = [max(-1, token) for token in core.transcript.ids()]
        if held != known:
            raise Broken("transcript", f"session {core.id} holds {held}, and its client knows {known}")


def _tokens_of(session: Session) -> list[tuple[int, bool]]:
    embedded = {at for span in session.context.embeds for at in range(span.start, span.start + len(span.embeds))}
    return [(token, at in embedded) for at, token in enumerate(session.context.token_ids)]


def _check_left(backend: Backend) -> None:
    """Everything that was taken is given back."""
    engine = backend.engine
    if len(engine._sessions):
        ids = [session.id for session in engine._sessions]
        raise Broken("given back", f"sessions {ids} live on though nobody speaks")
    pool = engine._pool
    if pool.num_free != pool.num_pages:
        raise Broken("given back", f"{pool.num_pages - pool.num_free} pages are nobody's")
    if backend.responses._unanswered:
        raise Broken("given back", f"{len(backend.responses._unanswered)} turns are waited for, and nobody is there")
    if list(engine._tiers.storage):
        raise Broken("given back", "copies of KV are kept for nobody")
    for path, size in sizes_of(engine).items():
        most = backend.sizes_at_start.get(path, 0) + most_at(path, pool.num_pages)
        if size > most:
            raise Broken("memory", f"{path} holds {size} items when nobody is there, and {most} are meant")
