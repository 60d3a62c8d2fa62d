"""The input of the sampler: what a row's next token depends on besides the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class SamplingOptions(Protocol):
    """The sampling options; `client/PROTOCOL.md` describes each."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Sequence[tuple[int, float]]: ...
    @property
    def has_penalties(self) -> bool: ...
    @property
    def logprobs(self) -> bool | int: ...
    @property
    def num_top_logprobs(self) -> int: ...


class SeenTokens(Protocol):
    """The distinct ids of a context, int64 [n], and the count of each, int64 [n]."""

    @property
    def ids(self) -> NDArray[np.int64]: ...
    @property
    def counts(self) -> NDArray[np.int64]: ...


class _NoTokens:
    ids = counts = np.empty(0, np.int64)


NO_TOKENS: SeenTokens = _NoTokens()


class SamplingRow(NamedTuple):
    """The input to sample one token, besides the logits.

    Attributes:
        options: the turn's sampling options.
        seen: the tokens of the context; may be empty without penalties.
        seed: the session's seed, below 2**63.
        position: absolute position of the new token.
        banned_ids: ids that must not be chosen.
        allowed: uint32 [vocab_size / 32, rounded up], a bit for each token that may be chosen; None allows all.
        unknown: int64 [n], the last tokens of the context if the host does not know them yet: not included in `seen`,
            and on the device of the logits.
        spared_ids: int64 [n], ids that presence and frequency penalties leave alone, however often they were seen.
    """

    options: SamplingOptions
    seed: int
    position: int
    seen: SeenTokens = NO_TOKENS
    banned_ids: Sequence[int] = ()
    unknown: Tensor | None = None
    allowed: NDArray[np.uint32] | None = None
    spared_ids: NDArray[np.int64] = NO_TOKENS.ids


class _Greedy:
    """Options of a turn that takes the likeliest token."""

    temperature = 0.0
    top_k = 0
    top_p = 1.0
    min_p = presence_penalty = frequency_penalty = 0.0
    repetition_penalty = 1.0
    logit_bias: Sequence[tuple[int, float]] = ()
    has_penalties = logprobs = False
    num_top_logprobs = 0


# A row whose likeliest token is taken, wherever it is: one for all of them, since nothing else is to be said.
LIKELIEST = SamplingRow(_Greedy(), seed=0, position=0)
