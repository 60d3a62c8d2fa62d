"""Grammars that answers must match: compiled once for all turns, and followed token by token (llguidance).

What may come next is a function of the grammar and the answer's tokens alone. So a matcher is never saved: whoever has
these two makes another one, which goes on the same.

    GrammarSource ──compile, any thread──▶ Grammar ──begin, the engine's thread──▶ Matcher
      an option         kept by Grammars     one for all turns                       one for each answer

An answer may have several to choose from: see `answer_grammar`.

A grammar costs what its author likes. Its size is bounded, each step and the states of its lexer are; and one that
takes too long all the same is refused from then on. A text with a bound takes a state for each of its characters. So
an answer that needs more states than are kept for all gets a lexer of its own, with more room.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from microturn.errors import FailedPrecondition, MicroturnError
from microturn.text.grammar_source import (
    MAX_OWN_LEXER_STATES,
    MAX_SOURCE_LEN,
    GrammarSource,
    as_llguidance,
    refusal,
)
from microturn.text.grammar_vocabulary import TokenTexts, read_vocabulary
from microturn.text.tool_formats import ToolFormat

MAX_KEPT = 32
MAX_LEXER_STATES = 10_000  # kept for the next answers; some 1.5 kB each

# What an answer may take of the engine's thread: so much, and so much more for each of its tokens.
_FREE_S = 0.2
_TOKEN_S = 0.002

_TRIAL_LEN = 32

_TOO_MANY_STATES = "too many states"  # as the library says it
# For a text with a bound a state takes so much, and each token has fewer states.
_STATE_FUEL = 10
_STATES_OF_TOKEN = 50


class Grammars:
    """The grammars of one model; callable in any thread.

    Args:
        read_tokens: called with the first grammar.
        eos_ids: tokens that end an answer.
        tool_format: how the model writes tool calls; None where that is not known.

    Attributes:
        tool_format: as above.
    """

    def __init__(
        self, read_tokens: Callable[[], TokenTexts], eos_ids: Collection[int], tool_format: ToolFormat | None = None
    ) -> None:
        self.tool_format = tool_format
        self._read_tokens = read_tokens
        self._eos_ids = sorted(eos_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiling = threading.Lock()
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()

    def find(self, source: GrammarSource) -> Grammar | None:
        """A grammar that is kept; does not wait."""
        grammar = self._kept.get(source)
        if grammar is not None:
            try:
                self._kept.move_to_end(source)
            except KeyError:  # another thread has just given it up
                self._kept[source] = grammar
        return grammar

    def compile(self, source: GrammarSource) -> Grammar:
        """Compiles a grammar and tries it, or finds it.

        Raises:
            InvalidArgument: it is none, allows no answer, or is too large.
        """
        if len(source.text) > MAX_SOURCE_LEN:
            raise refusal(source, f"it has {len(source.text)} characters: at most {MAX_SOURCE_LEN} are read")
        with self._compiling:
            grammar = self.find(source)
            if grammar is None:
                if self._vocabulary is None:
                    self._vocabulary = read_vocabulary(self._read_tokens(), self._eos_ids)
                grammar = Grammar(source, self._as_llguidance(source), self._vocabulary)
                grammar.try_out()
                self._kept[source] = grammar
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return grammar

    def _as_llguidance(self, source: GrammarSource) -> str:
        if source.kind != "tool_choice":
            return as_llguidance(source)
        assert self.tool_format is not None, "how the model writes calls is not known"
        return self.tool_format.as_llguidance(source)


class Grammar:
    """A compiled grammar.

    Attributes:
        source: what it was compiled from.
        fault: why no turn may use it any more.

    Args:
        source: what it is compiled from.
        written: the same, as the library writes it.
        vocabulary: of the model.

    Raises:
        InvalidArgument: see `Grammars.compile`.
    """

    def __init__(self, source: GrammarSource, written: str, vocabulary: LLTokenizer) -> None:
        self.source = source
        self._written = written
        self.num_words = -(-vocabulary.vocab_size // 32)
        self._vocab_size = vocabulary.vocab_size
        self._vocabulary = vocabulary
        self.fault: MicroturnError | None = None
        self._first = self._compiled(MAX_LEXER_STATES)

    def begin(self, token_ids: Sequence[int] = ()) -> Matcher:
        """A matcher of an answer that begins with these tokens.

        Raises:
            FailedPrecondition: no answer begins so, or none goes on behind it.
            InvalidArgument: the grammar has blown up.
        """
        if self.fault is not None:
            raise self.fault
        matcher = self._first.deep_copy()
        are_ids = all(0 <= token_id < self._vocab_size for token_id in token_ids)
        num_taken = matcher.try_consume_tokens(list(token_ids)) if are_ids else 0
        if num_taken < len(token_ids):
            raise FailedPrecondition(
                f"the tokens in the context are no beginning of what '{self.source.kind}' allows, from the "
                f"{num_taken + 1}. on: begin the value anew, or where it began"
            )
        follower = Matcher(self, matcher, token_ids)
        if follower.is_complete:
            raise FailedPrecondition(f"what '{self.source.kind}' asks for is in the context already, and whole")
        return follower

    def renew(self) -> None:
        """Makes a beginning for the next answers.

        The states of the lexer that answers visit are kept for all; once they are too many, no answer goes on.
        """
        self._first = self._compiled(MAX_LEXER_STATES)

    def begin_alone(self) -> LLMatcher:
        """A matcher of nothing yet, whose lexer no other answer shares."""
        return self._compiled(MAX_OWN_LEXER_STATES)

    def give_up(self, reason: str, num_tokens: int) -> MicroturnError:
        """Has every turn refused from now on, unless this answer is merely too long; returns what they are told.

        Args:
            reason: what went wrong.
            num_tokens: of the answer.
        """
        if _TOO_MANY_STATES in reason and _STATES_OF_TOKEN * num_tokens > MAX_OWN_LEXER_STATES:
            return refusal(
                self.source,
                f"this answer is too long for it: of texts with a bound at most {MAX_OWN_LEXER_STATES} bytes are "
                "counted: bound them to less, or not at all",
            )
        if reason.startswith("NoExtension"):
            reason = "it allows no answer, or leads where no token of this model goes on"
        else:
            reason = f"it takes too long: make it simpler or smaller ({reason})"
        self.fault = refusal(self.source, reason)
        return self.fault

    def try_out(self) -> None:
        """Follows the grammar with random tokens.

        Raises:
            InvalidArgument: it allows no answer, or blows up.
        """
        matcher, dice = Matcher(self, self._first.deep_copy(), []), np.random.default_rng(0)
        if matcher.is_complete:
            raise refusal(self.source, "it allows no answer but an empty one")
        for _ in range(_TRIAL_LEN):
            if matcher.is_complete:
                return
            bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
            matcher.accept(int(dice.choice(bits.nonzero()[0])))

    def _compiled(self, max_lexer_states: int) -> LLMatcher:
        limits = LLParserLimits(
            max_items_in_row=1100,  # a choice has as many as entries, of which there are up to 1,024
            initial_lexer_fuel=500_000 + _STATE_FUEL * max_lexer_states,
            step_lexer_fuel=30_000,
            step_max_items=5000,
            max_lexer_states=max_lexer_states,
            max_grammar_size=50_000,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._vocabulary, self._written, log_level=0, limits=limits)
        if matcher.is_error():
            raise refusal(self.source, matcher.get_error())
        return matcher


class Matcher:
    """Follows one answer through a grammar.

    Attributes:
        allowed: the tokens that may come next, a bit for each, the lowest first: uint32 [vocab_size / 32, rounded up].
        is_complete: the answer is a whole value, and ends.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, token_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._token_ids = list(token_ids)
        self._num_given = len(token_ids)
        self._spent_s = 0.0
        self._is_alone = False
        self.allowed: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.is_complete = False
        self._follow([])

    def allows(self, token_id: int) -> bool:
        """Whether a token of the vocabulary may come next."""
        return bool(self.allowed[token_id // 32] >> np.uint32(token_id % 32) & 1)

    def accept(self, token_id: int) -> None:
        """Goes on behind a token that is allowed.

        Raises:
            InvalidArgument: the grammar has blown up.
        """
        self._token_ids.append(token_id)
        self._follow([token_id])

    def _follow(self, token_ids: Sequence[int]) -> None:
        began_s = time.thread_time()
        if not self._advance(token_ids):
            if not self._is_alone:
                self._grammar.renew()
                self._is_alone = True
            self._matcher = self._grammar.begin_alone()
            if not self._advance(self._token_ids):
                raise self._grammar.give_up(self._matcher.get_error(), len(self._token_ids))
        self._spent_s += time.thread_time() - began_s
        num_steps = len(self._token_ids) - self._num_given
        if self._spent_s > _FREE_S + _TOKEN_S * num_steps:
            raise self._grammar.give_up(f"{self._spent_s * 1e3:.0f} ms for {num_steps} tokens", num_steps)

    def _advance(self, token_ids: Sequence[int]) -> bool:
        """Takes tokens, and finds out what may come behind them; False where the library gave up."""
        matcher = self._matcher
        if not matcher.consume_tokens(list(token_ids)):
            return False
        self.is_complete = matcher.is_stopped()
        if not self.is_complete:
            words = np.zeros(self._grammar.num_words, np.uint32)
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self.allowed = words
        return not matcher.is_error()
