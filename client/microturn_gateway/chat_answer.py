"""The answer of a chat completion, whole and in chunks, in OpenAI's shape."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from microturn_client import Status, Tokens, ToolCall, ToolEvent
from microturn_gateway.answer import PromptCount
from microturn_gateway.chat_tools import as_delta, as_openai
from microturn_gateway.conversation import new_id
from microturn_gateway.logprobs import Logprob, TokenLogprobs

_FINISH_REASONS: Mapping[str, str] = {"stop": "stop", "complete": "stop", "interrupted": "stop", "cancelled": "stop"}


class ChatAnswer:
    """One answer.

    Args:
        model: what the server calls its model.
        has_logprobs: whether log probabilities were asked for.
    """

    def __init__(self, model: str, *, has_logprobs: bool = False) -> None:
        self._has_logprobs = has_logprobs
        self._token_logprobs = TokenLogprobs()
        self._logprobs: list[Logprob] = []
        self._frame = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}

    def whole(self, text: str, calls: Sequence[ToolCall], status: Status, count: PromptCount) -> dict[str, Any]:
        """The answer in one piece."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": as_openai(calls)}
        finish_reason = _finish_reason(status, has_called=bool(calls))
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish_reason}
        choice["logprobs"] = self._shown(self._logprobs)
        return {**self._frame, "object": "chat.completion", "choices": [choice], "usage": usage(status, count)}

    def begin(self) -> str:
        """The first chunk."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def take(self, event: Tokens | ToolEvent) -> list[Logprob]:
        """Remembers the log probabilities of what came; those that belong to its text."""
        if not isinstance(event, Tokens):
            self._token_logprobs.drop()
            return []
        told = self._token_logprobs.take(event)
        self._logprobs += told
        return told

    def delta(self, text: str, logprobs: Sequence[Logprob]) -> str:
        """A chunk with text."""
        return self._chunk({"content": text}, None, logprobs)

    def call_delta(self, event: ToolEvent, index: int) -> str | None:
        """A chunk with news of a call, its answer's `index`-th; None where an event brings none."""
        delta = as_delta(event, index)
        return None if delta is None else self._chunk({"tool_calls": [delta]}, None)

    def end(self, status: Status, *, has_called: bool) -> str:
        """The chunk that says why the answer ended."""
        return self._chunk({}, _finish_reason(status, has_called=has_called))

    def usage(self, status: Status, count: PromptCount) -> str:
        """The chunk with the numbers of tokens."""
        return _as_event({**self._chunk_frame, "choices": [], "usage": usage(status, count)})

    def error(self, error: Mapping[str, Any]) -> str:
        """What a stream ends with that failed after it had begun."""
        return _as_event({"error": error})

    @property
    def _chunk_frame(self) -> dict[str, Any]:
        return {**self._frame, "object": "chat.completion.chunk"}

    def _shown(self, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        return {"content": logprobs, "refusal": None} if self._has_logprobs else None

    def _chunk(
        self, delta: Mapping[str, Any], finish_reason: str | None, logprobs: Sequence[Logprob] | None = None
    ) -> str:
        shown = None if logprobs is None else self._shown(logprobs)
        choice = {"index": 0, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}
        return _as_event({**self._chunk_frame, "choices": [choice]})


def usage(status: Status, count: PromptCount) -> dict[str, Any]:
    """Numbers of tokens; cached ones are those of which the session held the KV."""
    prompt_len, cached_len = count.totals(status)
    return {
        "prompt_tokens": prompt_len,
        "completion_tokens": status.usage.output_tokens,
        "total_tokens": prompt_len + status.usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_len},
    }


def _finish_reason(status: Status, *, has_called: bool) -> str:
    if has_called and status.finish_reason in ("stop", "complete"):
        return "tool_calls"
    return _FINISH_REASONS.get(status.finish_reason, "length")


def _as_event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
