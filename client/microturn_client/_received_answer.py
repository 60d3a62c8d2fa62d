"""What has come of an answer. What comes again, after a failure, is recognised by how much had come before."""

from __future__ import annotations

from collections.abc import Collection

from microturn_client._call_reader import CallReader
from microturn_client._events import Tokens
from microturn_client._tool_events import ToolEvent
from microturn_client._wire import Response


class ReceivedAnswer:
    """An answer, as far as it has come.

    Attributes:
        start: absolute position of its first token; None before that has come.
        ids: its tokens.
        texts: the text that came with each of these.
        has_diverged: what came again was not what had come before.

    Args:
        tool_names: of the tools that it may call; without any, it is all text.
    """

    def __init__(self, tool_names: Collection[str]) -> None:
        self.start: int | None = None
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.has_diverged = False
        self._num_chars = 0
        self._num_ids_again = self._num_chars_again = 0
        self._calls = CallReader(tool_names) if tool_names else None

    @property
    def is_behind(self) -> bool:
        """Whether it comes again, and not yet as far as before."""
        return self._num_ids_again < len(self.ids)

    def begin_again(self) -> None:
        """It comes again, from its first token."""
        self._num_ids_again = self._num_chars_again = 0

    def take_in(self, response: Response, context_len: int) -> list[Tokens | ToolEvent]:
        """What a response has brought that is new; ``context_len`` is where text stands that comes before any token."""
        ids, text = self._new_ids(response), self._new_text(response)
        if not ids and not text:
            return []
        position = context_len if self.start is None else self.start + len(self.ids)
        if ids and self.start is None:
            assert response.position is not None
            self.start = position = response.position
        self.ids += ids
        self.texts += [""] * len(ids)
        if self.texts:
            self.texts[-1] += text
        num_known = len(response.ids) - len(ids)
        logprobs = response.logprobs and response.logprobs[num_known:]
        top_logprobs = response.top_logprobs and response.top_logprobs[num_known:]
        said, calls = (text, []) if self._calls is None else self._calls.feed(text)
        tokens = [Tokens(said, ids, position, logprobs, top_logprobs)] if ids or said else []
        return [*tokens, *calls]

    def end(self, context_len: int) -> list[Tokens | ToolEvent]:
        """The answer has ended: what was held as the beginning of a call is none."""
        del self.ids[self._num_ids_again :]  # sent again, it may have been asked for less
        del self.texts[self._num_ids_again :]
        if self._calls is None:
            return []
        said, calls = self._calls.end()
        position = context_len if self.start is None else self.start + len(self.ids)
        return [*([Tokens(said, (), position)] if said else []), *calls]

    def _new_ids(self, response: Response) -> tuple[int, ...]:
        before = self._num_ids_again
        self._num_ids_again += len(response.ids)
        num_known = max(0, min(len(response.ids), len(self.ids) - before))
        known, again = self.ids[before : before + num_known], list(response.ids[:num_known])
        self.ids[before : before + num_known] = again
        self.has_diverged = self.has_diverged or again != known
        return response.ids[num_known:]

    def _new_text(self, response: Response) -> str:
        before = self._num_chars_again
        self._num_chars_again += len(response.text)
        text = response.text[max(0, self._num_chars - before) :]
        self._num_chars += len(text)
        return text
