"""What a model that is a hash says to a plain list of tokens. Knows no session, no engine and no KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.errors import FailedPrecondition
from microturn.kv.window import Window
from microturn.model.sampler import draw
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions
from microturn.sessions.token_counts import TokenCounts
from microturn.text.answer_grammar import AnswerGrammar
from support.fake_runner import Item, expected_logits

# A token id, or the bytes of an embedding, float32 [hidden].
Token = int | bytes


def plain_answer(
    tokens: Sequence[Token],
    max_tokens: int,
    options: TurnOptions,
    seed: int,
    eos_ids: frozenset[int],
    window: Window | None,
    grammar: AnswerGrammar | None = None,
) -> tuple[list[int], str]:
    """The tokens that follow, up to one that stops or makes a value whole, and why they end."""
    items = [as_item(token) for token in tokens]
    stop_ids = {*options.stop_token_ids, *(() if options.ignore_eos else eos_ids)}
    answer: list[int] = []
    while len(answer) < max_tokens:
        banned = sorted(stop_ids) if len(answer) < options.min_tokens else ()
        logits = expected_logits(_seen(items, window))
        # A matcher of its own for each token: what may come depends on the answer so far alone.
        allowed = None if grammar is None else grammar.begin(answer).allowed(banned)
        answer.append(_choice(logits, items, options, seed, banned, allowed, eos_ids))
        items.append(answer[-1])
        if grammar is not None and _is_whole(grammar, answer):
            return answer, "complete"
        if answer[-1] in stop_ids:
            return answer, "stop"
    return answer, "length"


def _is_whole(grammar: AnswerGrammar, answer: Sequence[int]) -> bool:
    try:
        grammar.begin(answer)
    except FailedPrecondition:
        return True
    return False


def as_item(token: Token) -> Item:
    """A token as the model that is a hash has it."""
    return token if isinstance(token, int) else torch.from_numpy(np.frombuffer(token, np.float32).copy())


def _seen(items: list[Item], window: Window | None) -> list[Item]:
    if window is None:
        return items
    return items[: window.num_sinks] + items[window.num_sinks + window.evicted(len(items) - 1) :]


def _choice(
    logits: Tensor,
    items: Sequence[Item],
    options: TurnOptions,
    seed: int,
    banned: Sequence[int],
    allowed: NDArray[np.uint32] | None,
    eos_ids: frozenset[int],
) -> int:
    if not options.temperature and not options.has_penalties and not banned and allowed is None:
        return int(logits.argmax())
    history = [item for item in items if isinstance(item, int)]
    spared = np.array(sorted(eos_ids), np.int64)
    row = SamplingRow(options, seed, len(items), TokenCounts.of(history), banned, allowed=allowed, spared_ids=spared)
    return draw(logits[None], [row]).sampled()[0].token_id
