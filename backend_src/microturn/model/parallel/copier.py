"""Copies the pages of all ranks: an image in host memory has the parts of rank 0, then those of rank 1, and so on.

So sessions are moved, offloaded and saved as with one process; but what one number of ranks has written, another one
computes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from microturn.kv.copier import InPlaceCopier
from microturn.kv.image import KVImage
from microturn.kv.transfer import Transfer
from microturn.model.parallel.commands import ReadPages, WritePages
from microturn.model.parallel.followers import Followers
from microturn.model.parallel.ranks import Ranks


class ParallelCopier(InPlaceCopier):
    """A `KVCopier` at rank 0, for the pages of all ranks.

    Args:
        tensors: of this rank's pages.
        followers: the other ranks.
    """

    def __init__(self, tensors: Sequence[Tensor], followers: Followers) -> None:
        super().__init__(tensors, followers.size)
        self._followers = followers

    def read(self, pages: Sequence[int], image: KVImage, first: int) -> None:
        with self._followers.doing(ReadPages(tuple(pages))) as ranks:
            super().read(pages, image, first)
            for rank, part in self._others(image, range(first, first + len(pages))):
                ranks.receive(part, rank)

    def write(self, pages: Sequence[int], image: KVImage, first: int) -> Transfer:
        with self._followers.doing(WritePages(tuple(pages))) as ranks:
            for rank, part in self._others(image, range(first, first + len(pages))):
                ranks.send(part, rank)
            return super().write(pages, image, first)

    def _others(self, image: KVImage, span: range) -> Iterator[tuple[int, Tensor]]:
        """The parts of the other ranks in an image, of these pages, each with its rank."""
        num_own = len(self._tensors)
        for number, part in enumerate(image.blocks[0][num_own:], num_own):
            yield number // num_own, part[span.start : span.stop]


def send_pages(tensors: Sequence[Tensor], pages: Sequence[int], ranks: Ranks) -> None:
    """Sends a rank's pages to rank 0."""
    ids = torch.tensor(pages, dtype=torch.int64)
    for tensor in tensors:
        ranks.send(tensor.index_select(0, ids), 0)


def receive_pages(tensors: Sequence[Tensor], pages: Sequence[int], ranks: Ranks) -> None:
    """Receives a rank's pages from rank 0."""
    ids = torch.tensor(pages, dtype=torch.int64)
    for tensor in tensors:
        received = tensor.new_empty((len(pages), *tensor.shape[1:]))
        ranks.receive(received, 0)
        tensor.index_copy_(0, ids, received)
