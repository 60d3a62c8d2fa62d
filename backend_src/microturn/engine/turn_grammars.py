"""Gets turns the grammars of their answers, which are compiled beside the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from microturn.engine.answers import to_client_error
from microturn.errors import InvalidArgument
from microturn.offload.background import Background
from microturn.offload.file_thread import Outcome
from microturn.sessions.options import NO_CALLS, grammar_source
from microturn.sessions.turn import Turn
from microturn.text.answer_grammar import AnswerGrammar
from microturn.text.chat_templates import NO_TOOLS
from microturn.text.grammar import Grammars
from microturn.text.grammar_source import GrammarSource

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
        tools = NO_TOOLS if turn.request.options.get("tool_choice") == NO_CALLS else find_tools()
        if tools is None:
            return False
        sources = _alternatives(source, tools)
        if self._grammars.tool_format is None and sources[-1].kind == "tool_choice":
            turn.refuse(_unknown_format(source))
            return False
        known = [grammar for source in sources if (grammar := self._grammars.find(source)) is not None]
        if len(known) == len(sources):
            answer = AnswerGrammar(tuple(known))
            _hand(turn, Outcome(answer, answer.fault))
            return False

        def end(outcome: Outcome[AnswerGrammar]) -> None:
            _hand(turn, outcome)
            told()

        self._compiling.submit(partial(_compile, self._grammars, sources), end)
        return True


def _alternatives(source: GrammarSource, tools: str) -> list[GrammarSource]:
    """What an answer may match, of which it matches one.

    Args:
        source: what the turn asks for.
        tools: that may be called, as the session has them.
    """
    if source.kind == "tool_choice":
        return [replace(source, tools=tools)]
    return [source] if tools == NO_TOOLS else [source, GrammarSource("tool_choice", "required", tools)]


def _compile(grammars: Grammars, sources: Sequence[GrammarSource]) -> AnswerGrammar:
    return AnswerGrammar(tuple(map(grammars.compile, sources)))


def _unknown_format(source: GrammarSource) -> InvalidArgument:
    reason = "this model's chat template does not tell how it writes calls"
    if source.kind == "tool_choice":
        return InvalidArgument(f"tool_choice='{source.text[:100]}': {reason}: say it as a 'grammar'")
    return InvalidArgument(
        f"option '{source.kind}' in a session with tools: {reason}: give tool_choice='{NO_CALLS}' too"
    )


def _hand(turn: Turn, outcome: Outcome[AnswerGrammar]) -> None:
    turn.grammar = outcome.value
    if outcome.error is not None:
        turn.refuse(to_client_error(outcome.error))
