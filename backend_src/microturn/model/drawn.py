"""The sampled tokens of a step: on the device at once, on the host when the caller waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampled:
    """A sampled token; `logprob` is its log probability under the model's own distribution, None unless asked for."""

    token_id: int
    logprob: float | None


class Drawn:
    """The sampled tokens of all rows, which a GPU may still be computing.

    Attributes:
        ids: int64 [rows], on the device: the next step can be built from them before the host knows them.
    """

    def __init__(self, ids: Tensor, wanting: Sequence[int], logprobs: Tensor) -> None:
        """Enqueues the copy to the host without blocking.

        Args:
            ids: int64 [rows].
            wanting: indices of the rows that need a log probability.
            logprobs: float32 [len(wanting)].
        """
        self.ids = ids
        self._wanting = wanting
        # From a GPU the copy goes to pinned memory; a tensor on the host is not copied.
        self._host_ids = ids.to("cpu", non_blocking=True)
        self._host_logprobs = logprobs.to("cpu", non_blocking=True)
        self._arrival = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None

    def sampled(self) -> list[Sampled]:
        """The sampled tokens on the host. Waits for them, but not for work enqueued behind them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        logprobs = dict(zip(self._wanting, self._host_logprobs.tolist(), strict=True))
        return [Sampled(token_id, logprobs.get(row)) for row, token_id in enumerate(self._host_ids.tolist())]
