"""The sampled tokens of a step: on the device at once, on the host when the caller waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


# Not frozen, and with slots: a step makes one for each token, and a tuple takes longer to make and to read.
@dataclass(slots=True)
class Sampled:
    """A sampled token.

    Attributes:
        logprob: its log probability under the model's own distribution, None unless asked for.
        top: the likeliest ids with theirs, the likeliest first, as many as asked for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of the rows that asked for them, which a GPU may still be computing.

    Attributes:
        rows: their indices.
        chosen: float32 [rows], of the sampled tokens.
        num_top: for each, how many of the likeliest tokens it asked for.
        top_ids: int64 [rows, most of these]; None where no row asked.
        top: float32, of these.
    """

    rows: Sequence[int]
    chosen: Tensor
    num_top: Sequence[int]
    top_ids: Tensor | None = None
    top: Tensor | None = None

    def to_host(self) -> Logprobs:
        """A copy on the host, enqueued without blocking; a tensor on the host is not copied."""
        tensors = (None if of is None else of.to("cpu", non_blocking=True) for of in (self.top_ids, self.top))
        return Logprobs(self.rows, self.chosen.to("cpu", non_blocking=True), self.num_top, *tensors)

    def by_row(self) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
        """For each row the log probability of its token, and the likeliest tokens; of a copy that has arrived."""
        chosen = self.chosen.tolist()
        if self.top_ids is None or self.top is None:
            return {row: (logprob, ()) for row, logprob in zip(self.rows, chosen, strict=True)}
        tops = [
            tuple(zip(ids[:num], logprobs[:num], strict=True))
            for ids, logprobs, num in zip(self.top_ids.tolist(), self.top.tolist(), self.num_top, strict=True)
        ]
        return dict(zip(self.rows, zip(chosen, tops, strict=True), strict=True))


class Drawn:
    """The sampled tokens of all rows, which a GPU may still be computing.

    Attributes:
        ids: int64 [rows], on the device: the next step can be built from them before the host knows them.
    """

    def __init__(self, ids: Tensor, logprobs: Logprobs | None = None) -> None:
        """Enqueues the copy to the host without blocking.

        Args:
            ids: int64 [rows].
            logprobs: of the rows that asked for them; None where none did.
        """
        self.ids = ids
        # From a GPU the copy goes to pinned memory; a tensor on the host is not copied.
        self._host_ids = ids.to("cpu", non_blocking=True)
        self._host_logprobs = None if logprobs is None else logprobs.to_host()
        self._arrival = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None

    def sampled(self) -> list[Sampled]:
        """The sampled tokens on the host. Waits for them, but not for work enqueued behind them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        if self._host_logprobs is None:
            return list(map(Sampled, self._host_ids.tolist()))
        logprobs = self._host_logprobs.by_row()
        return [Sampled(token_id, *logprobs.get(row, ())) for row, token_id in enumerate(self._host_ids.tolist())]
