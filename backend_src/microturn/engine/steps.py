"""Forward passes: the model is given a step, and what it chose is committed to the turns.

On an asynchronous runner a second step is launched before the first one has landed, so that the model never waits:

    engine   launch 1, launch 2 │ wait │ commit 1, launch 3 │ wait │ commit 2, launch 4 │ …
    model    pass 1 ────────────────── pass 2 ───────────────────── pass 3 ──────────────

Pass 2 computes the tokens that pass 1 chooses: they stay on the model's device, and the host learns them later. A turn
may have ended with its token: then its row in pass 2 is *dropped*, and nothing of it is committed. It has written the
KV of that token one place behind what its session has in the cache. That is harmless:

- The page belonged to the session alone, since it was about to be written. Forks and the prefix cache share full pages,
  from before that place; a copy for a file reads no further than the session's KV went.
- The session may have given the page up by now, and another one may have it. The new owner reads only what it has
  written or copied there itself, and its passes and copies come after this one: the device works in our order.

A grammar says what may come next when the host knows the token before. So where a row of pass 2 has one, the tokens of
pass 2 are chosen after commit 1: the choice is enqueued while pass 2 runs, and the model does not wait for it either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from microturn.engine.in_flight_step import InFlightStep
from microturn.engine.lifecycle import Lifecycle
from microturn.engine.scheduled_row import ScheduledRow
from microturn.engine.scheduler import Scheduler
from microturn.engine.step_time import StepTimeModel
from microturn.engine.suspects import Suspects, given_up
from microturn.errors import InternalError
from microturn.model.batch import UNKNOWN_IDS, Batch
from microturn.model.drawn import Sampled
from microturn.model.runner import Runner
from microturn.model.sampler import draw
from microturn.model.sampling_row import LIKELIEST, NO_TOKENS, SamplingRow
from microturn.sessions.options import TurnOptions
from microturn.sessions.session import Session
from microturn.sessions.turn import Turn, TurnOutput
from microturn.telemetry.recorder import Recorder

log = logging.getLogger(__name__)


class Steps:
    """Launches steps, and commits their results.

    Attributes:
        runner: the model; a benchmark may replace it between two steps.
        step_time: learns how long passes take.

    Args:
        scheduler: says what may follow a step.
        lifecycle: ends the turns.
        suspects: learns whose passes fail.
        recorder: counts the steps.
        eos_ids: tokens that end a generation.
        control_ids: tokens that are no text.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        suspects: Suspects,
        step_time: StepTimeModel,
        recorder: Recorder,
        *,
        eos_ids: frozenset[int],
        control_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self.runner = runner
        self.step_time = step_time
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._suspects = suspects
        self._recorder = recorder
        self._eos_ids = eos_ids
        # A chat has them in each message: penalties for them would leave its answers no end.
        self._spared_ids = np.array(sorted(eos_ids | control_ids), np.int64)
        self._clock = clock

    @property
    def can_run_ahead(self) -> bool:
        """Whether a step may be launched behind one in flight.

        Of recurrent layers a step writes the state that it reads: nothing follows it before it is committed.
        """
        return self.runner.is_asynchronous and self.runner.kv.states is None

    def launch(self, rows: Sequence[ScheduledRow], before: InFlightStep | None = None) -> InFlightStep:
        """Gives the model a pass; if that fails, `process_result` reports why.

        Args:
            rows: whose tokens it computes.
            before: the step that still chooses the tokens of the first of them; None where all are known.
        """
        step = InFlightStep(rows, self._clock())
        try:
            built = [row.build() for row in rows]
            following = [row for row, seen in zip(rows, built, strict=True) if seen.token_ids is UNKNOWN_IDS]
            ids = before.ids_of(following) if before is not None and following else None
            step.batch = Batch(built, ids)
            step.choosing = [row for row, seen in zip(rows, built, strict=True) if seen.wants_logits]
            logits = self.runner.run(step.batch)
            if ids is not None and any(row.turn.matcher for row in rows):
                step.logits = logits
            else:
                step.drawn = draw(logits, self._sampling_rows(step.choosing, ids))
        except Exception as error:
            step.error = error
        return step

    def choose(self, step: InFlightStep) -> None:
        """Chooses the tokens of a step whose choice had to wait, now that those before them are committed."""
        if step.logits is None:
            return
        logits, step.logits = step.logits, None
        try:
            step.drawn = draw(logits, self._sampling_rows(step.choosing))
        except Exception as error:
            step.error = error

    def launch_next(self, step: InFlightStep, is_quiet_until: Callable[[float], bool]) -> InFlightStep | None:
        """Launches the step that follows one in flight; None where that must be over before anything is decided.

        Args:
            step: in flight.
            is_quiet_until: whether nothing else is to be done before a time, by the engine's clock.
        """
        if not self.can_run_ahead or step.error is not None:
            return None
        if not is_quiet_until(max(self._clock(), step.begun_s + self.step_time.pass_s(step.batch.num_tokens))):
            return None
        rows = self._scheduler.schedule_next(step.rows, self._lifecycle.running)
        return self.launch(rows, step) if rows else None

    def process_result(self, step: InFlightStep, following: InFlightStep | None) -> None:
        """Waits for a step, and commits its result for those turns that still run.

        Args:
            step: in flight.
            following: what was launched after it.
        """
        try:
            sampled = step.sampled()
        except Exception as error:
            self._fail(step, error)
            return
        landed_s = self._clock()
        if following is not None:
            following.begun_s = landed_s
        step_s = landed_s - step.begun_s
        self.step_time.observe(step.batch.num_tokens, step_s)
        self._recorder.stepped(len(step.rows), step.batch.num_tokens, step_s)
        end = 0
        for scheduled, row in zip(step.rows, step.batch.rows, strict=True):
            first, end = end, end + row.num_logits
            session, turn = scheduled.session, scheduled.turn
            if session.running is not turn:
                # It has ended with the token that this row computed.
                session.table.drop_newest_state()
                continue
            if not self._suspects.is_empty:
                self._suspects.clear(session)
            try:
                self._commit(scheduled, sampled[first:end])
            except Exception as error:
                self._lifecycle.fail(session, turn, error)

    def _fail(self, step: InFlightStep, error: Exception) -> None:
        """Undoes the turns of a step. Whatever went wrong, its sessions are the only ones that it can have touched."""
        log.error("a forward pass of %d rows failed", len(step.rows), exc_info=error)
        self._recorder.step_failed()
        failure = InternalError(f"the forward pass failed, nothing was appended: {error}")
        for row in step.rows:
            row.session.table.drop_newest_state()
        for session, turn in [(row.session, row.turn) for row in step.rows if row.is_wanted]:
            if self._suspects.blame(session):
                self._lifecycle.end(session, "failed", given_up(error))
            else:
                self._lifecycle.fail(session, turn, failure)

    def _sampling_rows(self, choosing: Sequence[ScheduledRow], ids: Tensor | None = None) -> list[SamplingRow]:
        """What the tokens behind rows, whose tokens end the context, are chosen by, and those behind their drafts'.

        Args:
            choosing: the rows.
            ids: int64 [n], the tokens of the first of them, where the host does not know them yet.
        """
        found: list[SamplingRow] = []
        num_unknown = 0 if ids is None else len(ids)
        for at, row in enumerate(choosing):
            if row.turn.is_greedy and row.turn.matcher is None:
                found += [LIKELIEST] * (1 + len(row.draft))
            else:
                found += self._changed_rows(row, ids[at : at + 1] if ids is not None and at < num_unknown else None)
        return found

    def _changed_rows(self, row: ScheduledRow, unknown: Tensor | None) -> Iterator[SamplingRow]:
        """The same for a row whose likeliest tokens are not simply taken.

        Args:
            row: the row.
            unknown: int64 [1], its token where the host does not know it yet.
        """
        session, turn = row.session, row.turn
        options, matcher = turn.options, turn.matcher
        num_before = turn.num_output + row.end - len(session.context)
        for num_drafted in range(1 + len(row.draft)):
            banned_ids = self._stop_ids(options) if num_before + num_drafted < options.min_tokens else ()
            allowed = None
            if matcher is not None:
                # Where the grammar leaves nothing else, what is banned may come all the same.
                allowed = matcher.allowed((*banned_ids, *(self._eos_ids if options.ignore_eos else ())))
                banned_ids = ()
            yield SamplingRow(
                options=options,
                seed=session.seed if options.seed is None else options.seed,
                position=row.end + num_drafted,
                seen=session.counts.follow(session.context) if options.has_penalties else NO_TOKENS,
                banned_ids=banned_ids,
                unknown=torch.tensor(row.draft[:num_drafted]) if num_drafted else unknown,
                allowed=allowed,
                spared_ids=self._spared_ids,
            )

    def _commit(self, row: ScheduledRow, sampled: Sequence[Sampled]) -> None:
        """Commits a row whose turn still runs, with the tokens behind it, where some were wanted."""
        session, turn = row.session, row.turn
        session.table.kv_len += row.num_tokens
        turn.num_computed += row.num_tokens
        if row.draft:
            self._commit_drafted(row, sampled)
        elif sampled:
            self._commit_token(session, turn, sampled[0])
        elif not session.num_pending:
            self._lifecycle.finish(session, turn, "append")
        if session.running is not turn:
            self._lifecycle.advance(session)

    def _commit_drafted(self, row: ScheduledRow, sampled: Sequence[Sampled]) -> None:
        """Commits the token behind a row, and those behind the tokens of its draft that are the chosen ones."""
        session, turn = row.session, row.turn
        pairs = zip(sampled, row.draft, strict=False)
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0].token_id == pair[1], pairs))
        turn.num_drafted += len(row.draft)
        for place, token in enumerate(sampled[: num_equal + 1]):
            if place:  # the token before this one was in the draft: its KV is there
                session.table.kv_len += 1
                turn.num_computed += 1
            turn.num_accepted += place < num_equal
            self._commit_token(session, turn, token)
            if session.running is not turn:
                break
        session.speculation.observe(len(session.context), len(row.draft), num_equal, row.draft_cost)
        session.table.trim()

    def _commit_token(self, session: Session, turn: Turn, sampled: Sampled) -> None:
        context, options, token_id = session.context, turn.options, sampled.token_id
        position = len(context)
        context.append_id(token_id)
        turn.num_output += 1
        if turn.first_token_s is None:
            turn.first_token_s = self._clock()
        piece = session.codec.accept(token_id)
        if turn.num_output == options.min_tokens:
            session.codec.begin_generation(options.stop, shows_special=not options.skip_special_tokens)
        if piece.stop is not None:
            turn.stop_reason = piece.stop
        elif turn.num_output > options.min_tokens and self._is_stop(token_id, options):
            turn.stop_reason = token_id
        if turn.matcher is not None:
            turn.matcher.accept(token_id)
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        top_logprobs = (sampled.top,) if sampled.top else ()
        output = TurnOutput((token_id,), piece.text, position, logprobs, None, None, top_logprobs)
        if turn.matcher is not None and turn.matcher.is_complete and piece.stop is None:
            self._lifecycle.finish(session, turn, "complete", output)
        elif turn.stop_reason is not None or turn.num_output == turn.max_tokens:
            self._lifecycle.finish(session, turn, "length" if turn.stop_reason is None else "stop", output)
        else:
            turn.put(output, self._clock())

    def _is_stop(self, token_id: int, options: TurnOptions) -> bool:
        """Whether it is one of `_stop_ids`, without making these for each token."""
        return token_id in options.stop_token_ids or (token_id in self._eos_ids and not options.ignore_eos)

    def _stop_ids(self, options: TurnOptions) -> tuple[int, ...]:
        return options.stop_token_ids if options.ignore_eos else (*options.stop_token_ids, *self._eos_ids)
