"""Gets turns the grammars of their answers, which are compiled beside the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from microturn.engine.answers import to_client_error
from microturn.errors import InvalidArgument
from microturn.offload.background import Background
from microturn.offload.file_thread import Outcome
from microturn.sessions.options import grammar_source
from microturn.sessions.turn import Turn
from microturn.text.grammar import Grammar, Grammars

FindTools = Callable[[], str | None]


class TurnGrammars:
    """Gets turns their grammars.

    Args:
        grammars: of the model; None where it has none.
        compiling: compiles them.
    """

    def __init__(self, grammars: Grammars | None, compiling: Background) -> None:
        self._grammars = grammars
        self._compiling = compiling

    def begin_fetch(self, turn: Turn, find_tools: FindTools, told: Callable[[], None]) -> bool:
        """Gets a turn its grammar, or the reason to refuse it, which travels on with it: an END still closes.

        Args:
            turn: its options are not known to agree with its session.
            find_tools: those of its session; None where it will be refused.
            told: called on the engine's thread once that is done, unless it is done now.

        Returns:
            Whether it takes a while.
        """
        source = grammar_source(turn.request.options)
        if source is None:
            return False
        if self._grammars is None:
            message = f"option '{source.kind}': grammars need a model with a token that ends an answer"
            turn.refuse(InvalidArgument(message))
            return False
        if source.kind == "tool_choice":
            if (tools := find_tools()) is None:
                return False
            if self._grammars.tool_format is None:
                turn.refuse(_unknown_format(source.text))
                return False
            source = replace(source, tools=tools)
        known = self._grammars.find(source)
        if known is not None:
            _hand(turn, Outcome(known, known.fault))
            return False

        def end(outcome: Outcome[Grammar]) -> None:
            _hand(turn, outcome)
            told()

        self._compiling.submit(partial(self._grammars.compile, source), end)
        return True


def _unknown_format(choice: str) -> InvalidArgument:
    return InvalidArgument(
        f"tool_choice='{choice[:100]}': this model's chat template does not tell how it writes calls: say it as a "
        "'grammar'"
    )


def _hand(turn: Turn, outcome: Outcome[Grammar]) -> None:
    turn.grammar = outcome.value
    if outcome.error is not None:
        turn.refuse(to_client_error(outcome.error))
