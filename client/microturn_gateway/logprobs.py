"""The log probabilities of an answer's tokens in OpenAI's shape, for chat completions and responses."""

from __future__ import annotations

from typing import Any

from microturn_client import Tokens
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields

Logprob = dict[str, Any]


class TokenLogprobs:
    """The tokens of one answer, each told with the text that it made certain.

    The first half of a character makes no text certain: it comes with the token that completes it, without text and
    bytes of its own. Where several tokens come at once, the last has the text of all. What leaves no text is not told.
    """

    def __init__(self) -> None:
        self._held: list[float] = []

    def take(self, event: Tokens) -> list[Logprob]:
        """What can be told now; nothing where the turn did not ask for log probabilities."""
        self._held += event.logprobs or ()
        if not event.text or not self._held:
            return []
        *others, last = self._held
        self._held = []
        return [*(_told("", logprob) for logprob in others), _told(event.text, last)]

    def drop(self) -> None:
        """What has not been told is no text: it is of a call."""
        self._held = []


def refuse_top_logprobs(fields: Fields) -> None:
    """Refuses the likeliest tokens in each place: the server tells their ids, and nobody here knows their text.

    Raises:
        Refusal: they are asked for.
    """
    if fields.take("top_logprobs", int, 0):
        message = "'top_logprobs' is not supported here: only the text of tokens that were said is known"
        raise Refusal("unsupported_parameter", message, param="top_logprobs")


def _told(text: str, logprob: float) -> Logprob:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
