"""The protocol of one realtime session as a state machine without I/O.

What a client sends becomes jobs, done one after the other. A job edits the conversation; what the server's context
then lacks becomes steps, each one turn; when they have ended, the job's events are told. So a client hears of nothing
that is not so, and a step that fails undoes its job.

    receive ─► jobs ─► edit the conversation ─► steps ─► ended ─► events
                 ▲ text of the buffer waits here for its beat, and grows

A shell runs the steps (`next_step`, `tokens`, `ended`, `failed`), sends the events and interrupts when told so.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from microturn_client import Status, Tokens, ToolEvent
from microturn_gateway import client_events as ask
from microturn_gateway.answer import Event, PromptCount, Response
from microturn_gateway.context import Message
from microturn_gateway.conversation import new_id
from microturn_gateway.edits import tell
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import parse_object
from microturn_gateway.jobs import Job, WaitingJobs
from microturn_gateway.realtime_tools import check_choice, choice_options
from microturn_gateway.report import report_of
from microturn_gateway.session_config import SessionConfig
from microturn_gateway.talk import Talk


@dataclass(frozen=True)
class Step:
    """One turn to run now.

    Attributes:
        message: what it appends; None for nothing.
        options: of the turn, `max_tokens` and `role` included.
        response: the one that it answers; None for a turn that only appends or cuts.
    """

    message: Message | None
    options: Mapping[str, Any]
    response: Response | None = None


class Realtime:
    """One session.

    Args:
        config: what the session is and does unless an event says otherwise.
        max_answer_tokens: how long an answer may be whose client says "inf".
        beat_s: least time between two micro-turns.

    Attributes:
        talk: what was said, and the session on the server that holds it.
    """

    def __init__(self, config: SessionConfig, *, max_answer_tokens: int, beat_s: float) -> None:
        self.config = config
        self.talk = Talk(config.tools)
        self._max_answer_tokens = max_answer_tokens
        self._beat_s = beat_s
        self._conversation_id = new_id("conv")
        self._jobs = WaitingJobs()
        self._size = 0
        self._job: Job | None = None
        self._messages: deque[Message] = deque()
        self._needs_turn = False
        self._step: Step | None = None
        self._count = PromptCount(0)
        self._beat_at_s = 0.0
        self._is_buffer_open = False
        self._must_interrupt = False
        self._has_begun = False
        self._events: list[Event] = []
        self._emit({"type": "session.created", "session": self.config.as_json()})

    def receive(self, text: str | bytes) -> None:
        """Takes a message of the client; what is wrong with it becomes an `error` event."""
        event_id = None
        self._size += len(text)
        try:
            raw = parse_object(text)
            event_id = raw.get("event_id") if isinstance(raw.get("event_id"), str) else None
            self._accept(ask.parse_event(raw), event_id)
        except Refusal as refusal:
            self.complain(refusal, event_id)

    def next_step(self, now_s: float) -> Step | None:
        """What to run now; None while a step runs or nothing is to be done before `wake_at`."""
        while self._step is None:
            if self._job is None and not self._begin_next(now_s):
                return None
            if self._job is not None:
                self._step = self._next_of_job(self._job)
        return self._step

    @property
    def wake_at(self) -> float | None:
        """When by the clock of `next_step` it has something to do that it has not now; None for never."""
        return self._beat_at_s if self._step is None and self._jobs else None

    @property
    def is_full(self) -> bool:
        """Whether so much waits that it has to become less before the next event is received."""
        return self._jobs.is_full

    @property
    def is_answering(self) -> bool:
        """Whether the running step generates."""
        return self._step is not None and self._step.response is not None

    def tokens(self, tokens: Tokens | ToolEvent, elapsed_ms: float) -> None:
        """The running step has generated this, so many milliseconds after it was sent."""
        assert self._step is not None
        assert self._step.response is not None
        self._emit(*self._step.response.take(tokens, elapsed_ms, self._last_id))
        if self._step.response.has_surplus and not self._step.response.is_cancelled:
            self._cancel(self._step.response.id)

    def ended(self, status: Status, elapsed_ms: float) -> None:
        """The running step has ended, so many milliseconds after it was sent."""
        step, job, self._step = self._step, self._job, None
        assert step is not None
        assert job is not None
        job.status, job.latency_ms = status, job.latency_ms + elapsed_ms
        if step.message is not None:
            self.talk.context.append(step.message, status.context_len)
        elif step.response is None:
            self.talk.context.rewound(status.context_len)
        self._count.take(status)
        if step.response is not None:
            report = report_of(status, elapsed_ms)
            events, piece, items = step.response.ended(status, self._count, report, self._last_id)
            self.talk.context.answer(piece, status.context_len)
            for item in items:
                self.talk.conversation = self.talk.conversation.with_item(item)
            self._emit(*events)

    def failed(self, refusal: Refusal) -> None:
        """The running step was refused or lost: nothing of it is in the context, and its job is undone.

        An answer is asked for once more, if all that was too much is the limit that it had from here.
        """
        job, self._step = self._job, None
        assert job is not None
        if refusal.room and not job.room and job.response is not None and not job.response.options.has_limit:
            job.room, self._needs_turn = refusal.room, True
            return
        self._job = None
        self._messages.clear()
        self.talk.undo(has_begun=job.status is not None)
        self._give_up(job, refusal)

    def complain(self, refusal: Refusal, event_id: str | None = None) -> None:
        """Tells the client of an error."""
        self._emit({"type": "error", "error": {**refusal.as_json(), "event_id": event_id}})

    def take_interrupt(self) -> bool:
        """Whether the running step must be interrupted now; said once."""
        must, self._must_interrupt = self._must_interrupt, False
        return must

    def take_events(self) -> list[Event]:
        """What to send to the client, each event once."""
        events, self._events = self._events, []
        return events

    @property
    def _last_id(self) -> str | None:
        items = self.talk.conversation.items
        return items[-1].id if items else None

    @property
    def _responses(self) -> list[Response]:
        return [job.response for job in (self._job, *self._jobs) if job is not None and job.response is not None]

    def _accept(self, event: ask.ClientEvent, event_id: str | None) -> None:
        if isinstance(event, ask.UpdateSession):
            event = self.config.possible(
                event, has_begun=self._has_begun, is_beginning_fixed=self.talk.has_fixed_beginning
            )
            self.config = self.config.updated(event)
            self._emit({"type": "session.updated", "session": self.config.as_json()})
            if event.refused:
                self.complain(Refusal.of_parts(event.refused), event_id)
            return
        if isinstance(event, ask.ClearAudio):
            self._emit({"type": f"{event.buffer}.cleared"})
            return
        if isinstance(event, ask.CancelResponse):
            self._cancel(event.response_id)
            return
        if isinstance(event, ask.AppendBuffer) and self._jobs.join(event):
            return
        if self._jobs.is_full:
            raise Refusal("too_many_events", "too much is waiting: send it again later", http_status=429)
        response = None
        if isinstance(event, ask.CreateResponse):
            if any(not response.is_cancelled for response in self._responses):
                raise Refusal("conversation_already_has_active_response", "a response is under way: wait, or cancel it")
            if event.tools and event.tools != self.config.tools:
                raise Refusal("unsupported_parameter", "tools are those of the session", param="response.tools")
            answers, tools = self.config.answers_with(event.answers), self.config.tools
            check_choice(answers.tool_choice, tools, "response.tool_choice")
            response = Response(answers, event.metadata, self._conversation_id, has_tools=bool(tools))
            self._emit(*response.created())
        if isinstance(event, ask.CreateItem | ask.CreateResponse) and self._is_buffer_open:
            self._jobs.put(Job(ask.CommitBuffer(), event_id, self.config, is_implied=True))
        if isinstance(event, ask.TruncateItem):
            self._stop_saying(event.item_id)
        if not isinstance(event, ask.RetrieveItem | ask.DeleteItem | ask.TruncateItem):
            self._is_buffer_open = isinstance(event, ask.AppendBuffer)
        self._jobs.put(Job(event, event_id, self.config, self._size, response))
        self._has_begun, self._size = True, 0

    def _cancel(self, response_id: str | None) -> None:
        for response in self._responses:
            if response_id in (None, response.id) and not response.is_cancelled:
                response.is_cancelled = True
                self._must_interrupt = self._step is not None and self._step.response is response
                return
        raise Refusal("response_cancel_not_active", "no such response is under way")

    def _stop_saying(self, item_id: str) -> None:
        for response in self._responses:
            if response.item_id == item_id and not response.is_cancelled:
                self._cancel(response.id)

    def _begin_next(self, now_s: float) -> bool:
        """Takes the next job that may begin; False when none may."""
        first = self._jobs.first
        if first is None:
            return False
        if isinstance(first.event, ask.AppendBuffer):
            if len(self._jobs) == 1 and now_s < self._beat_at_s:
                return False
            self._beat_at_s = now_s + self._beat_s
        job = self._jobs.take()
        if job.config.tools != self.talk.tools:
            self.talk.begin_anew(job.config.tools)
        self.talk.window = job.config.window
        held_len = self.talk.context.context_len
        try:
            missing = self.talk.edit(job.event, job.config.instructions, is_implied=job.is_implied)
        except Refusal as refusal:
            self._give_up(job, refusal)
            return True
        job.before = self.talk.before
        self._count = PromptCount(min(held_len, self.talk.context.end))
        self._messages.extend(missing)
        self._needs_turn = job.response is not None or (not missing and self.talk.context.rewind_to is not None)
        self._job = job
        return True

    def _next_of_job(self, job: Job) -> Step | None:
        context = self.talk.context
        if self._messages:
            message = self._messages.popleft()
            return Step(message, {"max_tokens": 0, "role": message.role, **context.rewinding})
        response, needs_turn, self._needs_turn = job.response, self._needs_turn, False
        if needs_turn and response is None:
            return Step(None, {"max_tokens": 0, **context.rewinding})
        if needs_turn and response is not None and not response.is_cancelled:
            context.go_on()
            return Step(
                None, {"role": "assistant", **self._answer_options(job, response), **context.rewinding}, response
            )
        if needs_turn and response is not None:
            self._emit(*response.cancelled())
        report = None if job.status is None else report_of(job.status, job.latency_ms)
        assert job.before is not None
        self._emit(*tell(job.event, job.before, self.talk.conversation, report))
        self._job = None
        return None

    def _answer_options(self, job: Job, response: Response) -> dict[str, Any]:
        options = response.options
        most = options.max_output_tokens if options.has_limit else job.room or self._max_answer_tokens
        choice = choice_options(options.tool_choice, self.talk.tools)
        # An answer asked for again, in the place of one that was deleted, is another one.
        return {"seed": secrets.randbits(63), **options.generation, **choice, "max_tokens": most}

    def _give_up(self, job: Job, refusal: Refusal) -> None:
        if job.response is not None:
            self._emit(*job.response.failed(refusal))
        else:
            self.complain(refusal, job.event_id)

    def _emit(self, *events: Event) -> None:
        self._events += [{"event_id": new_id("event"), **event} for event in events]
