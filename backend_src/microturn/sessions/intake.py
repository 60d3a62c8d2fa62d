"""What a turn does to its session's history before anything is computed: it cuts, then appends; or it changes nothing.

Everything that depends on the context is checked here, when the turn's time has come. Pages follow later. A turn that
came before changes nothing: it is answered as it was.
"""

from __future__ import annotations

from microturn.errors import ContextFull, FailedPrecondition, InvalidArgument, ResourceExhausted
from microturn.sessions.accounts import Accounts
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput, is_empty
from microturn.sessions.results import check_same, content_of
from microturn.sessions.session import Session
from microturn.sessions.turn import Turn, TurnRequest
from microturn.text.grammar import Grammar, Matcher


def append_input(
    session: Session, turn: Turn, *, max_tokens: int, accounts: Accounts | None = None, undoes_cut: bool = True
) -> None:
    """Cuts the context where the turn says so, and appends its input; one that is only counted is taken back.

    Args:
        session: the turn's.
        turn: its options have been set.
        max_tokens: how much it will generate at most; 0 where it will not be answered.
        accounts: say whether there is memory for that; None where the caller asks them.
        undoes_cut: whether `Session.roll_back_input` will put back what was cut, too.

    Raises:
        MicroturnError: why the turn must not run; nothing has changed then.
    """
    check_number(session, turn)  # the turn before this one may have been refused since this one arrived
    turn.number = session.num_turns
    history = session.history
    if turn.options.count_only and turn.options.rewind_to is not None:
        raise InvalidArgument("count_only changes nothing: leave rewind_to out")
    cut_at = _cut_position(session, turn)
    turn.num_cut = len(history) - cut_at
    turn.checkpoint = history.cut(cut_at) if turn.num_cut else history.checkpoint()
    behind_cut = turn.checkpoint if undoes_cut else history.checkpoint()
    try:
        _append(session, turn, max_tokens)
        session.num_turns += not turn.is_keepalive
        if accounts is not None:
            accounts.check(session, max_tokens)
        if turn.options.count_only:
            history.roll_back(turn.checkpoint)
    except Exception:
        session.roll_back_input(turn)
        raise
    turn.checkpoint = behind_cut


def check_number(session: Session, turn: Turn, *, num_before: int = 0) -> None:
    """Checks that a numbered turn is the next one, behind so many that wait.

    Raises:
        FailedPrecondition: it is not.
    """
    expected = session.num_turns + num_before
    if turn.is_numbered and turn.options.turn != expected:
        raise FailedPrecondition(f"turn {expected} comes before turn {turn.options.turn}", turn=expected)


def answer_repetition(session: Session, request: TurnRequest, *, max_waiting: int) -> bool:
    """Answers a turn that came before: from its record, or together with the one that is not done yet.

    Args:
        session: the turn's.
        request: of the turn.
        max_waiting: repetitions that one turn is answered to.

    Returns:
        Whether it came before.

    Raises:
        InvalidArgument: its number is that of another turn.
        FailedPrecondition: its answer is not kept any more.
        ResourceExhausted: too many clients wait for the turn.
    """
    number = request.options.get("turn")
    if number is None:
        return False
    for earlier in session.open_turns:
        if earlier.is_numbered and earlier.options.turn == number:
            check_same(request, content_of(earlier.request))
            if len(earlier.sinks) > max_waiting:
                raise ResourceExhausted(f"{len(earlier.sinks)} clients wait for turn {number}", retry_after_ms=200)
            earlier.attach(request.sink)
            break
    else:
        answer = session.results.find(request)
        if answer is None and number < session.num_turns:
            raise FailedPrecondition(
                f"the answer to turn {number} is not kept any more: go on with turn {session.num_turns}",
                turn=session.num_turns,
            )
        if answer is None:
            return False
        request.sink.put(answer)
    session.last_activity_s = max(session.last_activity_s, request.arrived_s)
    return True


def _cut_position(session: Session, turn: Turn) -> int:
    rewind_to, end = turn.options.rewind_to, len(session.history)
    if rewind_to is None:
        return end
    if rewind_to > end and not turn.interrupts:
        raise FailedPrecondition(f"rewind_to={rewind_to} is behind the end of the context", position=end)
    if rewind_to < session.least_rewind:
        raise FailedPrecondition(
            f"rewind_to={rewind_to} is in what the window has evicted", position=session.least_rewind
        )
    return min(rewind_to, end)


def _append(session: Session, turn: Turn, max_tokens: int) -> None:
    context, codec = session.context, session.codec
    given = turn.request.input
    embeds = given.embeds if isinstance(given, EmbedInput) else None
    start = len(context)
    text_state = codec.state
    if isinstance(given, TextInput):
        # Tokenizing a text that cannot fit would hold up all other sessions.
        prepared = turn.prepared
        least = codec.least_num_ids(given.text, session.max_context) if prepared is None else prepared.least_num_ids
        if least:
            _check_room(session, least, max_tokens)
    ids = _encode(session, turn, generates=max_tokens > 0)
    turn.num_input = len(ids) + (0 if embeds is None else len(embeds))
    if max_tokens and len(context) + turn.num_input == 0:
        raise InvalidArgument("there is nothing to generate from: the context is empty and so is the input")
    _check_room(session, turn.num_input, max_tokens)
    context.append_ids(ids)
    if embeds is not None:
        context.append_embeds(embeds)
    turn.appended_ids = ids
    if max_tokens or turn.num_input or codec.state is not text_state:
        session.history.mark_input(start)
    if max_tokens:
        turn.matcher = None if turn.grammar is None else _begin_value(session, turn, turn.grammar)
        # A stop string does not count before min_tokens.
        stop = turn.options.stop if turn.options.min_tokens == 0 else ()
        codec.begin_generation(stop, shows_special=not turn.options.skip_special_tokens)


def _encode(session: Session, turn: Turn, *, generates: bool) -> list[int]:
    """The ids that a turn's input becomes; before embeddings, those of text that was held and of the template."""
    context, codec, options = session.context, session.codec, turn.options
    given = turn.request.input
    appends = not is_empty(given) or generates
    if not appends and options.role is None:
        return []  # a keep-alive: text that is held stays held
    if isinstance(given, TextInput) or not appends:
        return codec.append_text(
            given.text if isinstance(given, TextInput) else "",
            role=options.role,
            parse_special=options.parse_special,
            flush=generates or options.count_only,
            last_token_id=context.last_token_id,
            prepared=turn.prepared,
        )
    ids = codec.append_other(role=options.role, last_token_id=context.last_token_id, input_follows=not is_empty(given))
    return [*ids, *given.token_ids] if isinstance(given, TokenInput) else ids


def _begin_value(session: Session, turn: Turn, grammar: Grammar) -> Matcher:
    """Follows the grammar to where the answer begins: through what of its value is in the context already."""
    context, end = session.context, len(session.context)
    first = end if turn.options.grammar_from is None else turn.options.grammar_from
    if first > end:
        raise FailedPrecondition(f"grammar_from={first} is behind the end of the context", position=end)
    if first < end and (first < context.first_kept or context.embeds_between(first, end)):
        raise FailedPrecondition(f"grammar_from={first}: embeddings, or what the window has evicted, are no value")
    return grammar.begin(context.ids_between(first, end))


def _check_room(session: Session, num_input: int, max_tokens: int) -> None:
    if num_input + max_tokens <= session.room:
        return
    if session.window is not None:
        raise ContextFull(
            f"{num_input} tokens of input and max_tokens={max_tokens} exceed the {session.room} that a turn may have "
            "beside its window: send less at a time"
        )
    raise ContextFull(
        f"{len(session.context)} tokens of context, {num_input} of input and max_tokens={max_tokens} exceed "
        f"max_context={session.max_context}: send less, rewind or open a new session"
    )
