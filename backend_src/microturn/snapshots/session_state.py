"""A session as the content of a snapshot, and back.

| tensor | type, shape | |
| --- | --- | --- |
| `token_ids` | int32 [n] | the context, without the dropped inputs behind the sinks |
| `forgotten` | int32 [v] | how often each id is among the dropped inputs, if any |
| `embeds` | float32 [k, hidden] | the embeddings in the context, concatenated |
| `embed_spans` | int64 [s, 2] | position in the context and length of each piece of `embeds` |
| `marks` | int64 [m, 3] | position of each turn's input in the context, and number of the text state behind it |

Sampling is a pure function of logits, history, seed and absolute position, so that context and seed are all that it
needs. The text state is opaque here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from microturn.errors import FailedPrecondition, InternalError
from microturn.kv.window import Window
from microturn.sessions.context import Context
from microturn.sessions.environment import SessionEnvironment
from microturn.sessions.history import History, Mark
from microturn.sessions.options import TurnOptions, parse_turn_options
from microturn.sessions.results import Result, Results
from microturn.sessions.session import Session
from microturn.sessions.turn import Status, TurnOutput
from microturn.snapshots.snapshot import Header, Snapshot
from microturn.text.chat_templates import tools_as_json
from microturn.text.codec import Codec


def snapshot_of(session: Session, environment: SessionEnvironment, *, epoch: int, expires_s: float) -> Snapshot:
    """Makes the snapshot of a session.

    Args:
        session: quiesced.
        environment: what it finds here.
        epoch: of the copy.
        expires_s: when the snapshot expires, in seconds since 1970.
    """
    context, codec = session.context, session.codec
    states = _TextStates(codec)
    marks = [(mark.start, mark.end, states.number_of(mark.text_state)) for mark in session.history.marks]
    state = {
        "seed": session.seed,
        "max_context": session.max_context,
        "window": None if session.window is None else asdict(session.window),
        "num_dropped": session.num_dropped,
        "num_forgotten": context.num_forgotten,
        "keeps_history": session.history_limit is None,
        "is_rebuilt": session.is_rebuilt,
        "idle_timeout_s": session.idle_timeout_s,
        "cache_salt": session.cache_salt,
        "priority": session.priority,
        "num_turns": session.num_turns,
        "age_s": environment.clock() - session.opened_s,
        "defaults": _set_options(session.defaults),
        "results": [_result_as_json(number, result) for number, result in session.results.kept()],
        "tools": json.loads(codec.tools) if codec.tools else [],
        "text_state": states.number_of(codec.state),
        "text_states": states.written,
    }
    tensors = {
        "token_ids": torch.tensor(context.kept_ids(), dtype=torch.int32),
        "marks": torch.tensor(marks, dtype=torch.int64).reshape(-1, 3),
    }
    if context.num_forgotten:
        tensors["forgotten"] = torch.from_numpy(context.forgotten_counts.copy())
    if context.embeds:
        spans = [(span.start, len(span.embeds)) for span in context.embeds]
        tensors["embeds"] = torch.cat([span.embeds for span in context.embeds])
        tensors["embed_spans"] = torch.tensor(spans, dtype=torch.int64)
    header = Header(session.id, epoch, environment.model_fingerprint, expires_s, session.key, session.tenant)
    version = 2 if context.num_forgotten else 1
    return Snapshot(header, state, tensors, format_version=version, base_epoch=session.base_epoch)


def check_model(header: Header, environment: SessionEnvironment) -> None:
    """Checks that a session was saved with this server's model.

    Raises:
        FailedPrecondition: it was not.
    """
    if header.model_fingerprint != environment.model_fingerprint:
        raise FailedPrecondition(
            f"session '{header.session_id}' was saved with another model (fingerprint {header.model_fingerprint}, "
            f"here {environment.model_fingerprint}): restore it on a server of that model"
        )


def restore_session(snapshot: Snapshot, environment: SessionEnvironment) -> Session:
    """Restores the session of a snapshot, without its KV; callable in any thread.

    Its idle time starts again.

    Raises:
        FailedPrecondition: it is of another model, or does not fit here.
        InternalError: its content is invalid.
    """
    check_model(snapshot.header, environment)
    try:
        return _restored(snapshot, environment)
    except (ValueError, TypeError, KeyError, IndexError, AssertionError, RuntimeError) as error:
        raise InternalError(
            f"the saved session '{snapshot.header.session_id}' has invalid content ({error!r}): open a new one"
        ) from error


def _restored(snapshot: Snapshot, environment: SessionEnvironment) -> Session:
    header, state, now_s = snapshot.header, snapshot.state, environment.clock()
    window = None if state["window"] is None else Window(**state["window"])
    max_context = min(state["max_context"], environment.max_context)
    num_tokens = len(snapshot.tensors["token_ids"]) if window is None else window.max_kept + 1
    if num_tokens > max_context:
        raise FailedPrecondition(
            f"session '{header.session_id}' needs room for {num_tokens} tokens, and max_context is {max_context} here: "
            "raise max_context or kv_tokens"
        )
    if window is not None:
        environment.check_window(window)
    codec = environment.new_codec(tools_as_json(state["tools"]))
    return Session(
        id=header.session_id,
        history=_restored_history(codec, state, snapshot.tensors, window),
        table=environment.new_table(window),
        defaults=parse_turn_options(state["defaults"]),
        seed=state["seed"],
        max_context=max_context,
        window=window,
        num_dropped=state["num_dropped"],
        history_limit=environment.history_limit(keeps_all=state.get("keeps_history", False)),
        is_rebuilt=state.get("is_rebuilt", False),
        idle_timeout_s=state["idle_timeout_s"],
        last_activity_s=now_s,
        results=Results(environment.num_results, map(_result_from_json, state["results"])),
        key=header.key,
        tenant=header.tenant,
        cache_salt=state["cache_salt"],
        opened_s=now_s - state["age_s"],
        origin="resumed",
        epoch=header.epoch,
        priority=state["priority"],
        num_turns=state["num_turns"],
    )


def _restored_history(
    codec: Codec, state: Mapping[str, Any], tensors: Mapping[str, Tensor], window: Window | None
) -> History:
    text_states = [codec.state_from_json(written) for written in state["text_states"]]
    context = Context()
    # Servers that dropped no inputs did not write this.
    if state.get("num_forgotten", 0):
        assert window is not None, "dropped inputs without a window"
        context.recall_gap(window.num_sinks, state["num_forgotten"], tensors["forgotten"].numpy())
    context.append_ids(tensors["token_ids"].tolist())
    if "embeds" in tensors:
        spans = tensors["embed_spans"].tolist()
        pieces = tensors["embeds"].split([num_tokens for _, num_tokens in spans])  # type: ignore[no-untyped-call]
        context.place_embeds([start for start, _ in spans], pieces)
    marks = [Mark(start, end, text_states[number]) for start, end, number in tensors["marks"].tolist()]
    history = History.recalled(codec, context, marks, text_states[state["text_state"]])
    history.check_integrity()
    return history


class _TextStates:
    """Deduplicates text states: most turns of a session end in the same one.

    Attributes:
        written: the states as JSON, by number.
    """

    def __init__(self, codec: Codec) -> None:
        self.written: list[Any] = []
        self._codec = codec
        self._numbers: dict[Any, int] = {}

    def number_of(self, text_state: Any) -> int:
        number = self._numbers.setdefault(text_state, len(self.written))
        if number == len(self.written):
            self.written.append(self._codec.state_as_json(text_state))
        return number


def _set_options(options: TurnOptions) -> dict[str, Any]:
    """The options that differ from their defaults."""
    return {
        option.name: value
        for option in fields(options)
        if (value := _as_json(getattr(options, option.name))) != _as_json(option.default)
    }


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _result_as_json(number: int, result: Result) -> dict[str, Any]:
    answer = result.answer._asdict()
    assert result.answer.status is not None, "only what has ended is kept"
    answer["status"] = asdict(result.answer.status)
    if not result.answer.top_logprobs:
        del answer["top_logprobs"]  # servers from before they were there read the rest
    return {"number": number, "content": result.content.hex(), "answer": answer}


def _result_from_json(written: Mapping[str, Any]) -> tuple[int, Result]:
    answer = dict(written["answer"])
    for name in ("token_ids", "logprobs", "appended_ids"):
        answer[name] = _tuple_or_none(answer[name])
    answer["top_logprobs"] = tuple(tuple(map(tuple, top)) for top in answer.get("top_logprobs", ()))
    output = TurnOutput(**{**answer, "status": Status(**answer["status"])})
    return written["number"], Result(bytes.fromhex(written["content"]), output)


def _tuple_or_none(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
