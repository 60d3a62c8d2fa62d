"""A user of the client library: whatever breaks, each turn is done once and every token of it is read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from microturn_client._errors import ConnectionLost, InvalidArgument, MicroturnError
from microturn_client._events import Tokens, TurnEnd
from microturn_client._lifecycle import SessionState
from microturn_client._opening import begin_branch
from microturn_client._pending_turn import PendingTurn
from microturn_client._requests import Requests
from microturn_client._retry import DEFAULT_RECOVERY
from microturn_client._session_core import SessionCore
from microturn_client._timeouts import DEFAULT_CLOSE_TIMEOUT_S
from simulation.plan import Act, Person
from simulation.raw_person import Connect, input_of
from simulation.shell import Shell, clock_of
from simulation.waiting import Wait, Waiting
from simulation.world import Broken, World

_FOREVER_S = 1e9


@dataclass(eq=False)
class _Turn:
    """A turn that she reads.

    Attributes:
        context_len: where it must end; None where that is not known.
    """

    pending: PendingTurn
    shell: Shell
    wait: Wait
    num_input: int
    ids: list[int] = field(default_factory=list)
    next_position: int | None = None
    context_len: int | None = None
    is_over: bool = False


class LibraryPerson:
    """One user.

    Attributes:
        is_done: she has done all that she wants to.
        shells: her sessions.

    Args:
        world: the clock.
        person: what she does.
        connect: opens a stream for a session.
        waiting: keeps how long she waits.
    """

    def __init__(self, world: World, person: Person, connect: Connect, waiting: Waiting) -> None:
        self.person = person
        self.is_done = False
        self._world = world
        self._connect = connect
        self._waiting = waiting
        self._name = f"user {person.number}"
        options = {"session_key": person.key or "a key", "seed": person.seed}
        requests = Requests("streaming_llm", person.session_id, options, is_recorded=True)
        self.shells: list[Shell] = []
        self._turns: list[_Turn] = []
        self._acts = iter(person.acts)
        self._take(SessionCore(requests, clock_of(world), recovery=DEFAULT_RECOVERY))
        self._next_act()

    @property
    def shell(self) -> Shell:
        """Her present session."""
        return self.shells[-1]

    def finish(self) -> None:
        """She goes without a word."""
        for shell in self.shells:
            shell.close()
        for turn in self._turns:
            self._waiting.end(turn.wait)

    def _take(self, core: SessionCore) -> None:
        self.shells.append(Shell(self._world, core, self._connect, self._read))

    # ---- her program ---------------------------------------------------------------------------------------------

    def _next_act(self) -> None:
        act = next(self._acts, None)
        if act is None or self.shell.core.lifecycle.state in (
            SessionState.CLOSED,
            SessionState.LOST,
            SessionState.GONE,
        ):
            self.is_done = True
            return
        self._world.after(act.pause_s, partial(self._do, act))

    def _do(self, act: Act) -> None:
        try:
            getattr(self, f"_{act.kind}")(act)
        except MicroturnError as error:
            self._world.say(f"{self._name} cannot {act.kind}: {error!r}")
        self._read()
        self._next_act()

    def _say(self, act: Act) -> None:
        options = {**act.sampling, "max_tokens": act.max_tokens}
        tensor = input_of(act)
        self._world.say(f"{self._name} says {tensor.name}{list(tensor.shape)} {options}")
        self._begin(self.shell, self.shell.core.begin_turn(tensor, options, _FOREVER_S))

    def _begin(self, shell: Shell, pending: PendingTurn) -> None:
        wait = self._waiting.begin(f"{self._name}'s turn {len(self._turns)}", is_durable=True)
        self._turns.append(_Turn(pending, shell, wait, 0))
        shell.flush()

    def _interrupt(self, act: Act) -> None:
        """She talks over what she hears; at times she says how much of it she has heard."""
        heard = None
        last = next((turn for turn in reversed(self._turns) if turn.ids and turn.shell is self.shell), None)
        if last is not None and act.choice % 2:
            heard = act.choice % (last.pending.num_handed + 1)
        self._world.say(f"{self._name} interrupts, heard {heard}")
        try:
            self._begin(self.shell, self.shell.core.begin_interrupt(_FOREVER_S, heard_tokens=heard))
        except InvalidArgument:
            return  # nothing was heard, or that answer is not the last any more

    def _leave(self, act: Act) -> None:
        """She reads no further in the last answer."""
        last = next((turn for turn in reversed(self._turns) if not turn.is_over and turn.shell is self.shell), None)
        if last is not None:
            self._world.say(f"{self._name} leaves an answer")
            last.pending.leave()
            self.shell.flush()

    def _fork(self, act: Act) -> None:
        number = self.person.number * 1000 + 500 + act.number
        is_cut = any("rewind_to" in turn.options for turn in self.shell.core.outbox)
        core, opening = begin_branch(self.shell.core, number, _FOREVER_S)
        self._world.say(f"{self._name} forks into {number}")
        num_known = len(core.transcript)
        self._take(core)
        self._begin(self.shell, opening)
        self._turns[-1].context_len = num_known if num_known and not is_cut else None

    def _wait(self, act: Act) -> None:
        """She waits until her turns are over."""
        if any(not turn.is_over for turn in self._turns):
            self._acts = chain([Act(act.number, "wait", pause_s=0.5)], self._acts)

    def _fall_silent(self, act: Act) -> None:
        self._acts = chain([Act(act.number, "wait", pause_s=4.0 + act.choice % 60)], self._acts)

    def _close(self, act: Act) -> None:
        end = self.shell.core.begin_close(DEFAULT_CLOSE_TIMEOUT_S)
        self._world.say(f"{self._name} closes")
        if end is not None:
            self._begin(self.shell, end)
            self._world.after(DEFAULT_CLOSE_TIMEOUT_S, partial(self._give_up_closing, self.shell))

    def _give_up_closing(self, shell: Shell) -> None:
        """Nobody has confirmed that the session is closed."""
        if shell.core.lifecycle.state is not SessionState.CLOSED:
            shell.core.connection_lost(ConnectionLost("the session was closed"))
        shell.close()
        self._read()

    # ---- what she reads ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for turn in self._turns:
            if not turn.is_over:
                self._read_turn(turn)

    def _read_turn(self, turn: _Turn) -> None:
        try:
            while (event := turn.pending.next_event()) is not None:
                if isinstance(event, Tokens):
                    self._hear_tokens(turn, event)
                elif isinstance(event, TurnEnd):
                    self._hear_end(turn, event)
        except MicroturnError as error:
            self._world.say(f"{self._name} is told {error!r}")
            turn.is_over = True
        if turn.pending.is_over or turn.is_over:
            turn.is_over = True
            self._waiting.end(turn.wait)

    def _hear_tokens(self, turn: _Turn, event: Tokens) -> None:
        if event.ids:
            if turn.next_position not in (None, event.position):
                raise Broken("tokens once", f"{self._name} hears position {event.position}, not {turn.next_position}")
            turn.next_position = event.position + len(event.ids)
        turn.ids += event.ids

    def _hear_end(self, turn: _Turn, event: TurnEnd) -> None:
        turn.is_over = True
        status = event.status
        self._world.say(f"{self._name} hears the end: {status.finish_reason} {status.context_len}")
        if turn.context_len not in (None, status.context_len):
            raise Broken("fork", f"a branch of {self._name}'s begins at {status.context_len}, not {turn.context_len}")
        if turn.pending.limit is None and len(turn.ids) != status.usage.output_tokens:
            raise Broken("tokens once", f"{self._name} has read {turn.ids}, of {status.usage.output_tokens} tokens")
