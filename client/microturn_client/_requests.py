"""Makes the requests of one session. Knows what START said, and so what every later turn must say; knows no states.

On the wire, what START says becomes the default of all later turns. Here the options of a turn are its own: what the
first turn said beyond the session's options is said again, with the value that holds then, by every later turn; and so
is the session's key.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from microturn_client._errors import InvalidArgument
from microturn_client._inputs import InputTensor
from microturn_client._messages_pb2 import ModelInferRequest
from microturn_client._options import BRANCH_OPTIONS, DEFAULT_MAX_TOKENS, DEFAULTS, ONE_TURN_OPTIONS
from microturn_client._pending_turn import PendingTurn
from microturn_client._wire import (
    Metadata,
    SessionId,
    add_options,
    build_request,
    check_session_id,
    mark_end,
    mark_start,
    stream_metadata,
)


class Requests:
    """Requests of one session.

    Attributes:
        session_id: integer in [1, 2**63), or a printable text of 1 to 128 bytes.
        options: of the session.
        model_fingerprint: of the model that it was opened with; None before it is known.
        tool_names: of the tools that its answers may call.
        route: the proxy's word for the session's server; None before it has said one, or where there is no proxy.

    Args:
        model: name of the model on the server.
        session_id: see above.
        options: see ``SessionOptions``.
        is_recorded: turns ask for what their input became.

    Raises:
        InvalidArgument, TypeError: for an id or an option that has no form on the wire.
    """

    def __init__(
        self, model: str, session_id: SessionId, options: Mapping[str, object], *, is_recorded: bool = False
    ) -> None:
        if misplaced := sorted(options.keys() & ONE_TURN_OPTIONS):
            raise InvalidArgument(f"'{misplaced[0]}' is an option of turns: give it to turn() or append()")
        add_options(ModelInferRequest(), options)
        self.model = model
        self.session_id = check_session_id(session_id)
        self.options = dict(options)
        self.model_fingerprint: str | None = None
        self.route: str | None = None
        self.tool_names = _tool_names(options.get("tools"))
        self.later_options: dict[str, object] = {}
        self._inherited: dict[str, object] = {}
        self._is_recorded = is_recorded
        self._ids = itertools.count(1)

    @property
    def key(self) -> object:
        """What every turn brings; None when the session has none."""
        return self.options.get("session_key")

    @property
    def goes_on(self) -> bool:
        """Whether START takes up a context that is on the server, as far as it says."""
        return not self.options.keys().isdisjoint(("fork_of", "resume"))

    @property
    def has_window(self) -> bool:
        """Whether the session has a window, its own or that of the session that it goes on from."""
        return {**self._inherited, **self.options}.get("overflow") == "window"

    @property
    def metadata(self) -> Metadata:
        """What the session's next stream begins with."""
        return stream_metadata(self.session_id, self.route)

    def check(self, options: Mapping[str, object]) -> None:
        """Raises what a turn with such options would: InvalidArgument, TypeError for what has no form on the wire."""
        add_options(ModelInferRequest(), options)

    def max_tokens(self, tensor: InputTensor, options: Mapping[str, object]) -> object:
        """Said with every turn, so that it never depends on what START said."""
        if options.get("count_only"):
            return 0
        if options.get("max_tokens") is not None:
            return options["max_tokens"]
        return 0 if tensor.is_empty else self.options.get("max_tokens", DEFAULT_MAX_TOKENS)

    def start(self, turn: PendingTurn) -> ModelInferRequest:
        """The turn that opens the session."""
        request = self._plain(turn)
        defaults = {**DEFAULTS, **self.options}
        self.later_options |= {name: value for name, value in defaults.items() if name in request.parameters}
        add_options(request, self.options)
        mark_start(request)
        return request

    def resume(self, turn: PendingTurn) -> ModelInferRequest:
        """A turn that goes on with the session on a stream that does not know it."""
        request = self.later(turn)
        mark_start(request)
        add_options(request, {"resume": True})
        return request

    def later(self, turn: PendingTurn) -> ModelInferRequest:
        """A turn of a session that is open."""
        request = self._plain(turn)
        add_options(request, {"session_key": self.key, **self.later_options})
        return request

    def end(self, turn: PendingTurn, *, resume: bool) -> ModelInferRequest:
        """The turn that closes the session, also on a stream that does not know it."""
        request = self.resume(turn) if resume else self.later(turn)
        mark_end(request)
        return request

    def reopen_with(self, seed: int | None) -> None:
        """From here on START opens the session anew: with this seed, from nothing, and on no other model."""
        self.options = {**self._inherited, **self.options}
        self.options.pop("resume", None)
        self.options.pop("fork_of", None)
        if seed is not None:
            self.options["seed"] = seed
        if self.model_fingerprint is not None:
            self.options["model_fingerprint"] = self.model_fingerprint

    def branch(self, session_id: SessionId, seed: int | None) -> Requests:
        """Requests of a session that goes on from this one's context; ``seed`` is as for ``reopen_with``."""
        options = {name: value for name, value in self.options.items() if name not in BRANCH_OPTIONS}
        branch = Requests(self.model, session_id, options, is_recorded=self._is_recorded)
        branch.options["fork_of"] = str(self.session_id)
        branch.route = self.route  # its parent's KV is there
        branch.tool_names = self.tool_names
        branch.later_options = dict(self.later_options)
        branch.model_fingerprint = self.model_fingerprint
        branch._inherited = {**self._inherited, **self.options} | ({} if seed is None else {"seed": seed})
        return branch

    def _plain(self, turn: PendingTurn) -> ModelInferRequest:
        options = dict(turn.sent_options)
        if turn.number is not None:
            options["turn"] = turn.number
        if self._is_recorded and not turn.is_end:
            options["return_appended_ids"] = True
        return build_request(self.model, str(next(self._ids)), self.session_id, turn.tensor, options)


def _tool_names(tools: object) -> tuple[str, ...]:
    """The names in descriptions of tools, as far as they have any."""
    told = tools if isinstance(tools, Sequence) else ()
    functions = [tool.get("function", tool) for tool in told if isinstance(tool, Mapping)]
    return tuple(
        str(function["name"]) for function in functions if isinstance(function, Mapping) and "name" in function
    )
