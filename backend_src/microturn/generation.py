"""How turns generate: what the choice of a token depends on beside the logits, and what becomes of it.

Knows sessions and when their turns end; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from microturn.drawn import Sampled
from microturn.lifecycle import Lifecycle
from microturn.options import TurnOptions
from microturn.sampler import SamplingRow
from microturn.scheduler import ScheduledRow
from microturn.session import Session
from microturn.token_counts import TokenCounts
from microturn.turn import Turn, TurnOutput

_NO_TOKENS = TokenCounts()


class Generation:
    """What forward passes do for turns.

    Args:
        lifecycle: ends them.
        eos_ids: tokens that end a generation.
        clock: seconds, monotonic.
    """

    def __init__(self, lifecycle: Lifecycle, eos_ids: frozenset[int], clock: Callable[[], float]) -> None:
        self._lifecycle = lifecycle
        self._eos_ids = eos_ids
        self._clock = clock

    def sampling_row(self, row: ScheduledRow, unknown: Tensor | None = None) -> SamplingRow:
        """What the token behind a row will be chosen by.

        Args:
            row: its tokens are the last of the context.
            unknown: int64 [1], the row's token where the host does not know it yet.
        """
        session, turn = row.session, row.turn
        options = turn.options
        num_before = turn.num_output + row.end - len(session.context)
        return SamplingRow(
            options=options,
            seed=session.seed if options.seed is None else options.seed,
            position=row.end,
            seen=session.counts.follow(session.context) if options.has_penalties else _NO_TOKENS,
            banned_ids=self._stop_ids(options) if num_before < options.min_tokens else (),
            unknown=unknown,
        )

    def commit(self, row: ScheduledRow, sampled: Sampled | None) -> None:
        """A row has been computed.

        Args:
            row: its turn runs.
            sampled: the token behind it, where one was wanted.
        """
        session, turn = row.session, row.turn
        session.table.kv_len += row.num_tokens
        turn.num_computed += row.num_tokens
        if sampled is not None:
            self._commit_token(session, turn, sampled)
        elif not session.num_pending:
            self._lifecycle.finish(session, turn, "append")
        self._lifecycle.advance(session)

    def _commit_token(self, session: Session, turn: Turn, sampled: Sampled) -> None:
        position = len(session.context)
        session.context.append_ids([sampled.token_id])
        turn.num_output += 1
        if turn.first_token_s is None:
            turn.first_token_s = self._clock()
        piece = session.codec.accept(sampled.token_id)
        if turn.num_output == turn.options.min_tokens:
            session.codec.begin_generation(turn.options.stop)
        if piece.stop is not None:
            turn.stop_reason = piece.stop
        elif sampled.token_id in self._stop_ids(turn.options):
            turn.stop_reason = sampled.token_id
        output = TurnOutput(
            token_ids=(sampled.token_id,),
            text=piece.text,
            position=position,
            logprobs=() if sampled.logprob is None else (sampled.logprob,),
        )
        if turn.stop_reason is not None or turn.num_output == turn.max_tokens:
            self._lifecycle.finish(session, turn, "length" if turn.stop_reason is None else "stop", output)
        else:
            turn.put(output)

    def _stop_ids(self, options: TurnOptions) -> tuple[int, ...]:
        return options.stop_token_ids if options.ignore_eos else (*options.stop_token_ids, *self._eos_ids)
