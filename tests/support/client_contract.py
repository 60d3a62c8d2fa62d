"""What a program may rely on, whoever answers: run against the fake server, and against the real one."""

from __future__ import annotations

import json

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


class ClientContract:
    """Tests with a fixture ``client``."""

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
            first, *events = session.turn([70], **GENERATE)
            assert isinstance(first, Resumed)
            assert first.exact
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
            assert session.append(PROMPT).model_fingerprint == fingerprint
            assert session.append([70]).model_fingerprint is None
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
