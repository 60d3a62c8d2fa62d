"""What a program may rely on, whoever answers: run against the fake server, and against the real one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest

from microturn_client import (
    Client,
    ContextFull,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Resumed,
    Session,
    SessionClosed,
    Tokens,
    TurnEnd,
    TurnTimeout,
)
from microturn_client._inputs import encode_input
from microturn_client._wire import build_request, mark_end

PROMPT = list(range(40, 60))
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
GENERATE = {"max_tokens": 12, "ignore_eos": True}


def generate(session: Session, given: object, **options: object) -> list[int]:
    turn = session.turn(given, **{**GENERATE, **options})
    return [token_id for event in turn if isinstance(event, Tokens) for token_id in event.ids]


def end_as_a_stranger(client: Client, session: Session) -> None:
    """END from who knows the id and not the key: it is refused, and Triton ends the sequence all the same."""
    request = build_request("streaming_llm", "1", session.id, encode_input(None), {"max_tokens": 0})
    mark_end(request)
    call = client._open_stream((), iter([request]))
    assert next(iter(call)).error_message.startswith("PERMISSION_DENIED")
    call.cancel()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


class ClientContract:
    """Tests with a fixture ``client``.

    Attributes:
        ends_sequences: whether END ends a sequence, though who sent it lacks the session's key, as Triton has it.
    """

    ends_sequences = True

    def test_a_turn_is_tokens_at_their_positions_and_an_end(self, client: Client) -> None:
        with client.session() as session:
            *tokens, end = session.turn(PROMPT, **GENERATE)
            assert isinstance(end, TurnEnd)
            position = len(PROMPT)
            for event in tokens:
                assert isinstance(event, Tokens)
                assert event.position == position
                position += len(event.ids)
            assert session.context_len == position == len(PROMPT) + 12
            assert end.status.finish_reason == "length"

    def test_a_server_that_is_there_is_ready(self, client: Client) -> None:
        assert client.ready()

    def test_counting_appends_nothing(self, client: Client) -> None:
        with client.session() as session:
            session.append(PROMPT)
            assert session.count_tokens([70, 71, 72]) == 3
            assert session.count_tokens(None) == 0
            num_text = session.count_tokens(" a word and some")
            assert 0 < num_text <= 16
            assert session.context_len == len(PROMPT)
            before = session.context_len
            session.turn(" a word and some", **{**GENERATE, "max_tokens": 1}).wait()
            assert session.context_len == before + num_text + 1
            with pytest.raises(ContextFull):
                session.count_tokens(list(range(1, 60)) * 1000)

    def test_counts_between_turns_play_no_part(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            session.append(PROMPT)
            session.count_tokens([70])
            answer = generate(session, [70, 71])
            session.count_tokens("a text")
            session.interrupt(heard_tokens=4)
            other.append([*PROMPT, 70, 71, *answer[:4]])
            assert generate(session, [73]) == generate(other, [73])

    def test_a_client_counts_without_a_session_of_yours(self, client: Client) -> None:
        assert client.count_tokens([1, 2, 3]) == 3
        assert client.count_tokens("so the first thing I do") > 0
        assert client.count_tokens(None) == 0

    def test_logprobs_come_with_the_likeliest_tokens_where_they_are_asked_for(self, client: Client) -> None:
        with client.session() as session:
            *tokens, _ = session.turn(PROMPT, **GENERATE, logprobs=5)
            for event in tokens:
                assert isinstance(event, Tokens)
                assert event.logprobs is not None
                assert event.top_logprobs is not None
                for token_id, logprob, top in zip(event.ids, event.logprobs, event.top_logprobs, strict=True):
                    assert top[0] == (token_id, logprob)
                    assert len(top) == 5
                    assert [each for _, each in top] == sorted((each for _, each in top), reverse=True)
            answer = session.turn(PROMPT, **GENERATE, logprobs=2).collect()
            assert [len(top) for top in answer.top_logprobs or ()] == [2] * len(answer.ids)
            for wanted in (True, False):
                for event in list(session.turn(PROMPT, **GENERATE, logprobs=wanted))[:-1]:
                    assert isinstance(event, Tokens)
                    assert (event.logprobs is not None) == wanted
                    assert event.top_logprobs is None
            with pytest.raises(InvalidArgument, match="logprobs"):
                session.append([1], logprobs=21)

    def test_an_appended_input_is_not_answered(self, client: Client) -> None:
        with client.session() as session:
            with pytest.raises(InvalidArgument, match="max_tokens is an option of turn"):
                session.append(PROMPT, max_tokens=3)  # type: ignore[call-arg]
            assert session.append(PROMPT).context_len == len(PROMPT)

    def test_the_transcript_is_what_was_given_and_answered(self, client: Client) -> None:
        with client.session() as session:
            assert session.transcript == ()
            session.append(PROMPT)
            session.append("some words")
            *tokens, end = session.turn(None, **GENERATE)
            assert isinstance(end, TurnEnd)
            first, words, answer = session.transcript
            assert (first.position, first.input_ids, first.text) == (0, tuple(PROMPT), None)
            assert (words.position, words.text, words.role, words.answer_ids) == (len(PROMPT), "some words", None, ())
            assert answer.answer == "".join(event.text for event in tokens if isinstance(event, Tokens))
            ids = [token_id for event in tokens if isinstance(event, Tokens) for token_id in event.ids]
            assert answer.answer_ids == tuple(ids)
            assert sum(len(turn.input_ids or ()) + len(turn.answer_ids) for turn in session.transcript) == (
                end.status.context_len
            )

    def test_the_transcript_of_an_interrupted_answer_is_what_was_heard(self, client: Client) -> None:
        with client.session() as session:
            tokens = [event for event in session.turn(PROMPT, **GENERATE) if isinstance(event, Tokens)]
            session.interrupt(heard_tokens=4)
            session.append([70])
            answered, later = session.transcript
            assert answered.answer_ids == tuple(token_id for event in tokens for token_id in event.ids)[:4]
            said = "".join(event.text for event in tokens)
            assert said.startswith(answered.answer)
            assert len(answered.answer) < len(said)
            assert (later.position, later.input_ids) == (len(PROMPT) + 4, (70,))

    def test_the_split_into_turns_plays_no_part(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            expected = generate(session, PROMPT)
            other.append(PROMPT[:7])
            other.append(PROMPT[7:])
            assert generate(other, None, max_tokens=5) + generate(other, None, max_tokens=7) == expected

    def test_sampling_depends_on_the_seed(self, client: Client) -> None:
        answers = []
        for seed in (1, 1, 2):
            with client.session(temperature=1.0, seed=seed) as session:
                answers.append(generate(session, PROMPT))
        assert answers[0] == answers[1] != answers[2]

    def test_turns_may_be_begun_while_others_run(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            turns = [session.turn([60 + number], **{**GENERATE, "max_tokens": 3}) for number in range(5)]
            answers = [[i for event in turn if isinstance(event, Tokens) for i in event.ids] for turn in turns]
            assert answers == [generate(other, [60 + number], max_tokens=3) for number in range(5)]

    def test_a_rewind_is_as_if_nothing_had_been_behind_it(self, client: Client) -> None:
        with client.session() as session:
            session.append(PROMPT)
            expected = generate(session, [70, 71])
            assert session.rewind(to=len(PROMPT)).context_len == len(PROMPT)
            assert generate(session, [70, 71]) == expected
            with pytest.raises(FailedPrecondition):
                session.rewind(to=10_000)

    def test_leaving_an_answer_cuts_it_behind_what_was_handed_out(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            for event in session.turn(PROMPT, **{**GENERATE, "max_tokens": 200}):
                assert isinstance(event, Tokens)
                handed = list(event.ids)
                break
            other.append([*PROMPT, *handed])
            assert generate(session, [70]) == generate(other, [70])
            assert session.context_len == other.context_len

    def test_barge_in_on_a_finished_answer_keeps_what_was_heard_and_what_was_said_since(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            answer = generate(session, PROMPT)
            session.append([70, 71])
            session.append([72])
            assert session.interrupt(heard_tokens=4).context_len == len(PROMPT) + 4
            other.append([*PROMPT, *answer[:4], 70, 71, 72])
            assert generate(session, [73]) == generate(other, [73])
            assert session.context_len == other.context_len

    def test_barge_in_on_a_running_answer_says_the_rest_is_interrupted(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            turn = session.turn(PROMPT, **{**GENERATE, "max_tokens": 1000})
            waiting = session.turn([70, 71], **GENERATE)
            first = next(turn)
            assert isinstance(first, Tokens)
            session.interrupt()
            assert turn.wait().finish_reason == "interrupted"
            assert waiting.wait().finish_reason == "interrupted"
            other.append([*PROMPT, *first.ids, 70, 71])
            assert generate(session, [73]) == generate(other, [73])

    def test_more_than_was_handed_out_was_not_heard(self, client: Client) -> None:
        with client.session() as session:
            with pytest.raises(InvalidArgument, match="nothing was handed out"):
                session.interrupt(heard_tokens=1)
            generate(session, PROMPT)
            with pytest.raises(InvalidArgument, match="12 were handed out"):
                session.interrupt(heard_tokens=13)
            with pytest.raises(InvalidArgument, match="one way"):
                session.interrupt(heard_tokens=1, heard_chars=1)

    def test_a_branch_goes_its_own_way(self, client: Client) -> None:
        with client.session(temperature=1.0) as session:
            session.append(PROMPT)
            with session.fork() as branch:
                assert generate(branch, [70]) == generate(session, [70])
                branch.append([71, 72])
                assert branch.context_len == session.context_len + 2

    def test_a_token_takes_a_session_up_again(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            session.append(PROMPT)
            generate(session, [70])
            with client.attach(session.token) as attached:
                generate(other, [*PROMPT, 70])
                assert generate(attached, [71]) == generate(other, [71])
            with pytest.raises(InvalidArgument):
                client.attach("no token")

    def test_who_took_a_session_up_closes_it(self, client: Client) -> None:
        with client.session() as session:
            generate(session, PROMPT)
            with client.attach(session.token) as attached:
                attached.append([71])
            with client.attach(session.token) as late, pytest.raises(NotFound):
                late.append([72])

    def test_who_took_a_session_up_and_asked_nothing_leaves_it(self, client: Client) -> None:
        with client.session() as session:
            generate(session, PROMPT)
            with client.attach(session.token):
                pass
            with client.attach(session.token) as attached:
                attached.append([71])

    def test_a_session_is_its_owners(self, client: Client) -> None:
        with client.session() as session:
            session.append(PROMPT)
            with client.session(session_id=session.id, resume=True) as thief, pytest.raises(PermissionDenied):
                thief.append([1])
            assert len(generate(session, None)) == 12

    def test_a_strangers_end_takes_nothing_from_the_owner(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            session.append(PROMPT)
            end_as_a_stranger(client, session)
            events = list(session.turn([70], **GENERATE))
            assert [event.exact for event in events if isinstance(event, Resumed)] == [True] * self.ends_sequences
            answer = [token_id for event in events if isinstance(event, Tokens) for token_id in event.ids]
            end_as_a_stranger(client, session)
            assert session.interrupt(heard_tokens=4).context_len == len(PROMPT) + 5
            end_as_a_stranger(client, session)
            with session.fork() as branch:
                assert answer == generate(other, [*PROMPT, 70])
                other.rewind(to=len(PROMPT) + 5)
                assert generate(session, [71]) == generate(branch, [71]) == generate(other, [71])

    def test_a_strangers_end_behind_a_running_turn_loses_no_token(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            turn = session.turn(PROMPT, **{**GENERATE, "max_tokens": 40})
            first = next(turn)
            assert isinstance(first, Tokens)
            end_as_a_stranger(client, session)
            waiting = session.turn([70], **GENERATE)
            answers = [
                [i for event in told if isinstance(event, Tokens) for i in event.ids] for told in (turn, waiting)
            ]
            answers[0][:0] = first.ids
            assert answers == [generate(other, PROMPT, max_tokens=40), generate(other, [70])]
            assert session.context_len == other.context_len

    def test_a_session_whose_sequence_a_stranger_ended_is_closed_by_its_owner(self, client: Client) -> None:
        """Triton refused the owner's END as well, and the session kept its place until its idle time was over."""
        session = client.session()
        session.append(PROMPT)
        end_as_a_stranger(client, session)
        status = session.close()
        assert status is not None
        assert (status.finish_reason, status.context_len) == ("closed", len(PROMPT))
        with client.attach(session.token) as attached, pytest.raises(NotFound):
            attached.append([1])

    def test_what_is_not_there_cannot_be_taken_up(self, client: Client) -> None:
        with client.session(session_id="never-opened", resume=True) as session, pytest.raises(NotFound):
            session.append([1])

    def test_a_refused_turn_changes_nothing_and_those_behind_it_are_done(self, client: Client) -> None:
        with client.session(max_context=64) as session, client.session() as other:
            session.append(PROMPT)
            refused, later = session.turn(max_tokens=500), session.turn([70], **GENERATE)
            with pytest.raises(ContextFull):
                refused.wait()
            answer = [i for event in later if isinstance(event, Tokens) for i in event.ids]
            assert answer == generate(other, [*PROMPT, 70])

    def test_text_that_grows_by_parts_of_words_is_one_text(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            for part in ("the quick br", "own fo", "x jumps"):
                session.append(part)
            assert generate(session, " over") == generate(other, "the quick brown fox jumps over")

    def test_a_session_is_opened_on_the_model_that_it_names_alone(self, client: Client) -> None:
        fingerprint = client.model_info().model_fingerprint
        assert fingerprint is not None
        with client.session(model_fingerprint=fingerprint) as session:
            told = session.append(PROMPT).model_fingerprint
            assert told is not None
            assert session.append([70]).model_fingerprint is None
        # What a session is told covers the type of the weights too, and may be another name of the same model.
        with client.session(model_fingerprint=told) as session:
            assert session.append(PROMPT).model_fingerprint == told
        with client.session(model_fingerprint="another") as session, pytest.raises(FailedPrecondition, match="model"):
            session.append(PROMPT)

    def test_a_closed_session_takes_no_turns(self, client: Client) -> None:
        session = client.session()
        session.append(PROMPT)
        status = session.close()
        assert status is not None
        assert status.finish_reason == "closed"
        with pytest.raises(SessionClosed):
            session.append([1])

    def test_leaving_a_session_ends_what_runs_and_the_session_at_once(self, client: Client) -> None:
        """END waited behind the answer that nobody read, for all of the 5 s that closing may take."""
        with client.session(max_context=8192) as session:
            turn = session.turn(PROMPT, max_tokens=4000, ignore_eos=True)
            next(turn)
            left_s = time.monotonic()
        assert time.monotonic() - left_s < 2.0
        with client.attach(session.token) as attached, pytest.raises(NotFound):
            attached.append([1])

    def test_leaving_a_turns_block_cuts_it_behind_what_was_handed_out(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            with session.turn(PROMPT, **{**GENERATE, "max_tokens": 200}) as turn:
                first = next(turn)
                assert isinstance(first, Tokens)
            assert list(turn) == []
            other.append([*PROMPT, *first.ids])
            assert generate(session, [70]) == generate(other, [70])

    def test_a_turn_is_had_as_a_whole(self, client: Client) -> None:
        with client.session() as session, client.session() as other, client.session() as third:
            *tokens, end = session.turn(PROMPT, **GENERATE)
            said = "".join(event.text for event in tokens if isinstance(event, Tokens))
            assert isinstance(end, TurnEnd)
            answer = other.turn(PROMPT, **GENERATE, logprobs=False).collect()
            assert (answer.text, answer.status.usage) == (said, end.status.usage)
            assert list(answer.ids) == [i for event in tokens if isinstance(event, Tokens) for i in event.ids]
            assert answer.logprobs is None
            assert third.turn(PROMPT, **GENERATE).text() == said

    def test_an_answer_that_is_not_streamed_comes_at_once_and_is_the_same(self, client: Client) -> None:
        with client.session() as session, client.session(stream=False) as other:
            answer, end = other.turn(PROMPT, **GENERATE)
            assert isinstance(answer, Tokens)
            assert isinstance(end, TurnEnd)
            assert list(answer.ids) == generate(session, PROMPT)
            assert (answer.position, end.status.context_len) == (len(PROMPT), len(PROMPT) + 12)
            streamed = list(other.turn([70], **GENERATE, stream=True))
            assert len(streamed) > len(list(session.turn([70], **GENERATE, stream=False))) == 2
            assert generate(other, [71]) == generate(session, [71])

    def test_an_answer_with_an_interval_is_the_same(self, client: Client) -> None:
        with client.session() as session, client.session(stream_interval_ms=1000) as other:
            *tokens, end = other.turn(PROMPT, **GENERATE)
            assert isinstance(end, TurnEnd)
            ids = [token_id for event in tokens if isinstance(event, Tokens) for token_id in event.ids]
            assert ids == generate(session, PROMPT)
            assert generate(other, [70], stream_interval_ms=0) == generate(session, [70])

    def test_an_interrupted_answer_that_is_not_streamed_has_what_was_generated(self, client: Client) -> None:
        with client.session() as session:
            session.append(PROMPT)
            turn = session.turn(PROMPT, **{**GENERATE, "max_tokens": 1000}, stream=False)
            session.turn([70], max_tokens=0, on_overlap="interrupt").wait()
            answer = turn.collect()
            assert answer.status.finish_reason == "interrupted"
            assert session.context_len == 2 * len(PROMPT) + len(answer.ids) + 1

    def test_news_reaches_whatever_is_called_first(self, client: Client) -> None:
        """Only the events of a turn said it, so a program that appends and rewinds never heard of a loss."""
        called: list[Resumed] = []
        with client.session(on_resumed=called.append) as session:
            session.append(PROMPT)
            assert session.resumed == ()
            for act in (lambda: session.append([70]), lambda: session.rewind(to=5), session.interrupt):
                end_as_a_stranger(client, session)
                told = act().resumed
                assert [news.exact for news in told] == [True] * self.ends_sequences
                assert told == session.resumed[len(session.resumed) - len(told) :]
            assert len(session.resumed) == 3 * self.ends_sequences
            assert session.append([71]).resumed == ()
            # The first turn that is iterated over says what only those calls were told; the next one does not.
            assert [event for event in session.turn([72], **GENERATE) if isinstance(event, Resumed)] == list(
                session.resumed
            )
            assert not [event for event in session.turn([73], **GENERATE) if isinstance(event, Resumed)]
            wait_until(lambda: len(called) == len(session.resumed))
            assert tuple(called) == session.resumed

    def test_turns_that_find_no_room_wait_for_it(self, client: Client) -> None:
        """Of twenty, the ninth was refused and those behind it were appended: a hole in what the program had said."""
        with client.session() as session, client.session() as other:
            turns = [session.turn([60 + number], max_tokens=1, ignore_eos=True) for number in range(20)]
            answers = [turn.collect().ids for turn in turns]
            assert answers == [
                tuple(generate(other, [60 + number], max_tokens=1, ignore_eos=True)) for number in range(20)
            ]
            assert session.context_len == other.context_len == 40

    def test_ask_is_a_users_message_and_its_answer(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            session.append("What is ", role="user")
            answer = session.ask("two and two?", max_tokens=12).collect()
            other.append("What is two and two?", role="user")
            assert answer.ids == other.turn(role="assistant", max_tokens=12).collect().ids
            assert session.context_len == other.context_len
            with pytest.raises(InvalidArgument, match="role"):
                session.ask("and three?", role="user")

    def test_an_answer_whose_message_is_refused_is_not_given(self, client: Client) -> None:
        with client.session(max_context=64) as session:
            session.append(PROMPT)
            asked, later = session.ask(PROMPT * 3, max_tokens=4), session.turn([70], max_tokens=0)
            with pytest.raises(ContextFull):
                asked.collect()
            assert later.wait().context_len == len(PROMPT) + 1

    def test_a_turn_that_goes_on_with_the_users_message_is_warned_of(self, client: Client) -> None:
        with client.session() as session:
            with pytest.warns(UserWarning, match=r"session.ask\(text\)"):
                turn = session.turn("What is 2+2?", role="user", max_tokens=4)
            turn.wait()
            session.append("And 3+3?", role="user")

    def test_one_thread_speaks_and_another_one_listens(self, client: Client) -> None:
        heard: list[list[int]] = [[]]
        with client.session() as session, client.session() as other:

            def listen() -> None:
                for event in session:
                    if isinstance(event, Tokens):
                        heard[-1] += event.ids
                    elif isinstance(event, TurnEnd):
                        heard.append([])

            listening = threading.Thread(target=listen)
            listening.start()
            for number in range(4):
                session.send([60 + number], max_tokens=3, ignore_eos=True)
                session.append([80 + number])
            wait_until(lambda: len(heard) == 5)
            expected = []
            for number in range(4):
                expected.append(generate(other, [60 + number], max_tokens=3))
                other.append([80 + number])
            assert heard == [*expected, []]
        listening.join(10.0)
        assert not listening.is_alive()

    def test_the_total_time_of_a_turn_is_bounded_by_itself(self, client: Client) -> None:
        with client.session() as session:
            turn = session.turn(PROMPT, max_tokens=4000, ignore_eos=True, total_timeout_s=0.02)
            with pytest.raises(TurnTimeout, match="total time"):
                turn.wait()
            assert session.append([70]).finish_reason == "append"

    def test_what_comes_meanwhile_is_one_micro_turn(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            events = list(session.stream(([70 + n] for n in range(6)), every_ms=5, max_tokens=0))
            assert sum(isinstance(event, TurnEnd) for event in events) * 2 == len(events) <= 12
            assert generate(session, [90]) == generate(other, [*range(70, 76), 90])

    # ---- grammars --------------------------------------------------------------------------------------------------

    def test_an_answer_is_a_value_of_its_schema_and_complete(self, client: Client) -> None:
        with client.session() as session:
            *tokens, end = session.turn(PROMPT, max_tokens=100, json_schema=SCHEMA)
            assert isinstance(end, TurnEnd)
            assert (end.status.finish_reason, end.status.stop_reason) == ("complete", None)
            value = json.loads("".join(event.text for event in tokens if isinstance(event, Tokens)))
            assert value.keys() == {"colour", "count"}
            assert value["colour"] in ("red", "blue")
            assert 1 <= value["count"] <= 9

    def test_a_value_that_was_cut_short_goes_on_as_if_it_had_not_been(self, client: Client) -> None:
        with client.session() as whole, client.session() as session:
            expected = generate(whole, PROMPT, max_tokens=100, ignore_eos=False, json_schema=SCHEMA)
            heard = generate(session, PROMPT, max_tokens=4, ignore_eos=False, json_schema=SCHEMA)
            assert heard == expected[:4]
            options = {"max_tokens": 100, "json_schema": SCHEMA, "grammar_from": len(PROMPT)}
            *_, end = turn = list(session.turn(None, **options))
            heard += [token_id for event in turn if isinstance(event, Tokens) for token_id in event.ids]
            assert heard == expected
            assert isinstance(end, TurnEnd)
            assert end.status.finish_reason == "complete"
            with pytest.raises(FailedPrecondition):
                session.turn(None, **options).wait()

    def test_an_answer_is_one_of_the_choices_in_its_turn_alone(self, client: Client) -> None:
        with client.session() as session, client.session() as other:
            ids = generate(session, PROMPT, choice=["yes", "no"])
            assert generate(session, PROMPT) == generate(other, [*PROMPT, *ids, *PROMPT])

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"json_schema": {"type": "frob"}}, "frob"),
            ({"json_schema": "{"}, "JSON"),
            ({"choice": []}, "choice"),
            ({"choice": ["a"], "regex": "a"}, "give one"),
            ({"grammar_from": 0}, "comes with"),
        ],
    )
    def test_what_is_no_grammar_is_refused_and_changes_nothing(
        self, client: Client, options: dict[str, object], words: str
    ) -> None:
        with client.session() as session, client.session() as other:
            session.append(PROMPT)
            with pytest.raises(InvalidArgument, match=words):
                session.turn([5], **options).wait()
            assert generate(session, PROMPT) == generate(other, [*PROMPT, *PROMPT])
