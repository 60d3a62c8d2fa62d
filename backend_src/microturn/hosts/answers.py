"""Parts of a turn's answer: those that are ready together become one response, and its tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from microturn.errors import MicroturnError
from microturn.sessions.turn import TurnOutput

Answer = TurnOutput | MicroturnError


def packed(answers: Sequence[Answer]) -> Answer:
    """A turn's answers since the last response as one, in their order and at least one."""
    last = answers[-1]
    if isinstance(last, MicroturnError):
        return last  # tokens generated before it are rolled back
    return TurnOutput.joined([answer for answer in answers if isinstance(answer, TurnOutput)])


def is_last(answer: Answer) -> bool:
    """Whether it ends the turn."""
    return isinstance(answer, MicroturnError) or answer.status is not None


def output_tensors(output: TurnOutput) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a response by their names in the wire contract; texts are objects of bytes."""
    tensors = {}
    if output.token_ids:
        tensors["output_ids"] = np.array([output.token_ids], np.int32)
        tensors["output_position"] = np.array([[output.position]], np.int32)
    if output.text:
        tensors["text_output"] = np.array([[output.text.encode()]], np.object_)
    if output.logprobs:
        tensors["logprobs"] = np.array([output.logprobs], np.float32)
    if output.top_logprobs:
        top = np.array(output.top_logprobs)[None]  # [1, tokens, likeliest, 2]
        tensors["top_ids"] = top[..., 0].astype(np.int32)
        tensors["top_logprobs"] = top[..., 1].astype(np.float32)
    if output.appended_ids is not None:
        tensors["appended_ids"] = np.array([output.appended_ids], np.int32)
    if output.status is not None:
        tensors["status"] = np.array([[json.dumps(vars(output.status)).encode()]], np.object_)
    return tensors
