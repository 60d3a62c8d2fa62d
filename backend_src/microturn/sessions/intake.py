"""What a turn does to its session's history before anything is computed: it cuts, then appends.

Everything that depends on the context is checked here, when the turn's time has come. Pages follow later.
"""

from __future__ import annotations

from microturn.errors import ContextFull, FailedPrecondition, InvalidArgument
from microturn.sessions.accounts import Accounts
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput
from microturn.sessions.session import Session
from microturn.sessions.turn import Turn
from microturn.text.answer_grammar import AnswerGrammar, AnswerMatcher


def append_input(
    session: Session, turn: Turn, *, max_tokens: int, accounts: Accounts | None = None, undoes_cut: bool = True
) -> None:
    """Cuts the context where the turn says so, and appends its input; one that is only counted is taken back.

    Args:
        session: the turn's.
        turn: its options have been set.
        max_tokens: how much it will generate at most; 0 where it will not be answered.
        accounts: say whether there is memory for that; None where the caller asks them.
        undoes_cut: whether `roll_back_input` will put back what was cut, too.

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
        roll_back_input(session, turn)
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


def append_queued(session: Session, accounts: Accounts) -> dict[Turn, Exception | None]:
    """Appends the inputs of the turns that wait, without generating; says of each why it was refused, or None."""
    outcomes: dict[Turn, Exception | None] = {}
    for turn in session.queued:
        outcomes[turn] = None
        try:
            append_input(session, turn, max_tokens=0, accounts=accounts)
        except Exception as error:
            outcomes[turn] = error
    return outcomes


def roll_back_input(session: Session, turn: Turn) -> None:
    """Undoes `append_input`, and all that has been appended since."""
    assert turn.checkpoint is not None
    session.history.roll_back(turn.checkpoint)
    session.num_turns = turn.number


def undo_end(session: Session, turn: Turn) -> None:
    """Undoes END with its turn, but for that of a session which has no other turn: nothing of it would be left."""
    session.is_closing = session.is_closing and (turn.request.opens or not turn.request.end)


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
    if max_tokens:
        turn.matcher = None if turn.grammar is None else _begin_value(session, turn, turn.grammar)
    if max_tokens or turn.num_input or codec.state is not text_state:
        session.history.mark_input(start)
    if max_tokens:
        # A stop string does not count before min_tokens.
        stop = turn.options.stop if turn.options.min_tokens == 0 else ()
        codec.begin_generation(stop, shows_special=not turn.options.skip_special_tokens)


def _encode(session: Session, turn: Turn, *, generates: bool) -> list[int]:
    """The ids that a turn's input becomes; before embeddings, those of text that was held and of the template."""
    context, codec, options = session.context, session.codec, turn.options
    given = turn.request.input
    appends = not given.is_empty or generates
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
    ids = codec.append_other(role=options.role, last_token_id=context.last_token_id, input_follows=not given.is_empty)
    return [*ids, *given.token_ids] if isinstance(given, TokenInput) else ids


def _begin_value(session: Session, turn: Turn, grammar: AnswerGrammar) -> AnswerMatcher:
    """Follows the grammar to where the answer begins: through what of its value is in the context already."""
    context, end = session.context, len(session.context)
    first = end if turn.options.grammar_from is None else turn.options.grammar_from
    if first > end:
        raise FailedPrecondition(f"grammar_from={first} is behind the end of the context", position=end)
    if first < end and (first < context.first_kept or context.embeds_between(first, end)):
        raise FailedPrecondition(f"grammar_from={first}: embeddings, or what the window has evicted, are no value")
    if first == end:
        session.codec.drop_half_character()
    return grammar.begin(context.ids_between(first, end))


def _check_room(session: Session, num_input: int, max_tokens: int) -> None:
    if num_input + max_tokens <= session.room:
        return
    room = max(0, session.room - num_input)
    if session.window is not None:
        raise ContextFull(
            f"{num_input} tokens of input and max_tokens={max_tokens} exceed the {session.room} that a turn may have "
            "beside its window: send less at a time",
            room=room,
        )
    raise ContextFull(
        f"{len(session.context)} tokens of context, {num_input} of input and max_tokens={max_tokens} exceed "
        f"max_context={session.max_context}: send less, rewind or open a new session",
        room=room,
    )
