"""Copies between pages and images that are done late, as a GPU's are, over tensors of a CPU.

It is the GPU's copier, over streams that do their work when they are asked how far they are, a few pieces at a time, or
when somebody waits. Until then garbage stands where the copies will be: so who looks too early, or gives memory on too
early, gets wrong bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from torch import Tensor

from microturn.kv.copier import CopyShare, KVCopier
from microturn.kv.gpu_copier import StreamCopier
from microturn.kv.image import KVImage
from microturn.kv.transfer import Transfer

# Makes what copies pages, given all that they consist of; None is what a CPU takes.
NewCopier = Callable[[Sequence[Tensor]], KVCopier] | None

_GARBAGE = 0xA5
# Pieces of work that are done each time somebody asks; a copy is three or more of them.
_NUMS_AT_ONCE = (0, 0, 0, 0, 1, 2)


class LateStream:
    """Implements `microturn.kv.copy_stream.CopyStream`. Steps are done when they return, so nothing waits for them.

    Args:
        random: says how much is done each time somebody asks.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._work: deque[Callable[[], object]] = deque()
        self._num_added = self._num_done = 0
        self._lock = threading.Lock()

    def enqueue(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)
            self._num_added += 1

    def follow_steps(self) -> None:
        pass

    def follow(self, transfer: Transfer) -> None:
        self.enqueue(transfer.wait)

    def mark(self) -> Transfer:
        return LateTransfer(self, self._num_added)

    def ask(self, number: int) -> bool:
        """Whether the first pieces are done, so many; some more are done by asking."""
        with self._lock:
            for _ in range(min(len(self._work), self._random.choice(_NUMS_AT_ONCE))):
                self._do_one()
            return self._num_done >= number

    def finish(self, number: int) -> None:
        """Does the first pieces, so many."""
        with self._lock:
            while self._num_done < number:
                self._do_one()

    def _do_one(self) -> None:
        self._work.popleft()()
        self._num_done += 1


@dataclass(frozen=True)
class LateTransfer:
    """The first pieces of a stream's work, so many."""

    stream: LateStream
    number: int

    def is_done(self) -> bool:
        return self.stream.ask(self.number)

    def wait(self) -> None:
        self.stream.finish(self.number)

    def precede_steps(self) -> None:
        self.stream.finish(self.number)  # the next step is done when it returns


class LateCopier(StreamCopier):
    """Copies that are late, of blocks of three pages, two of which are staged each way.

    Args:
        tensors: see `StreamCopier`.
        seed: of how late they are.
    """

    def __init__(self, tensors: Sequence[Tensor], seed: int = 0) -> None:
        random = Random(seed)
        super().__init__(tensors, LateStream(random), LateStream(random), pages_per_block=3, num_staged=2)
        self.share = CopyShare(for_turns=9, for_later=3, unit=3)

    def new_image(self, num_pages: int) -> KVImage:
        image = super().new_image(num_pages)
        for buffer in image.buffers:
            buffer.fill_(_GARBAGE)
        return image

    def write(self, pages: Sequence[int], image: KVImage, first: int) -> Transfer:
        for tensor in self._tensors:
            tensor[pages] = _GARBAGE
        return super().write(pages, image, first)
