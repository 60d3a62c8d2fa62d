"""Copies the pages of all ranks: an image in host memory has the parts of rank 0, then those of rank 1, and so on.

So sessions are moved, offloaded and saved as with one process; but what one number of ranks has written, another one
computes again. Copies are made at once: on GPUs, too, they take the time of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from microturn.kv.copier import InPlaceCopier, parts_of
from microturn.kv.image import KVImage
from microturn.kv.transfer import DONE, Transfer
from microturn.model.parallel.commands import ReadPages, WritePages
from microturn.model.parallel.followers import Followers
from microturn.model.parallel.ranks import Ranks


class _Piece(NamedTuple):
    """Some pages of one rank in one tensor.

    Attributes:
        rank: whose they are.
        own: bytes [num_pages, bytes] of rank 0's tensor; the rank's has the same shape.
        copy: bytes [pages, bytes] in an image.
    """

    rank: int
    own: Tensor
    copy: Tensor


class ParallelCopier(InPlaceCopier):
    """A `KVCopier` at rank 0, for the pages of all ranks.

    Args:
        tensors: of this rank's pages, each [num_pages, ...].
        followers: the other ranks.
    """

    def __init__(self, tensors: Sequence[Tensor], followers: Followers) -> None:
        super().__init__(_bytes_of(tensors))
        self._set_parts(parts_of(tensors) * followers.size)
        self._followers = followers

    def read(self, pages: Sequence[int], image: KVImage, first: int) -> None:
        if not pages:
            return
        with self._followers.doing(ReadPages(tuple(pages))) as ranks:
            ids = _ids_of(pages, ranks)
            for rank, own, copy in self._pieces(image, slice(first, first + len(pages))):
                staged = own.new_empty(copy.shape)
                copy.copy_(ranks.receive(staged, rank) if rank else torch.index_select(own, 0, ids, out=staged))

    def write(self, pages: Sequence[int], image: KVImage, first: int) -> Transfer:
        if not pages:
            return DONE
        with self._followers.doing(WritePages(tuple(pages))) as ranks:
            ids = _ids_of(pages, ranks)
            for rank, own, copy in self._pieces(image, slice(first, first + len(pages))):
                staged = copy.to(ranks.device)
                if rank:
                    ranks.send(staged, rank)
                else:
                    own.index_copy_(0, ids, staged)
        return DONE

    def _pieces(self, image: KVImage, span: slice) -> Iterator[_Piece]:
        """These pages of an image, rank after rank."""
        for number, part in enumerate(image.blocks[0]):
            rank, place = divmod(number, len(self._tensors))
            yield _Piece(rank, self._tensors[place], part[span].flatten(1).view(torch.uint8))


def send_pages(tensors: Sequence[Tensor], pages: Sequence[int], ranks: Ranks) -> None:
    """Sends a rank's pages to rank 0."""
    ids = _ids_of(pages, ranks)
    for own in _bytes_of(tensors):
        ranks.send(own.index_select(0, ids), 0)


def receive_pages(tensors: Sequence[Tensor], pages: Sequence[int], ranks: Ranks) -> None:
    """Receives a rank's pages from rank 0."""
    ids = _ids_of(pages, ranks)
    for own in _bytes_of(tensors):
        own.index_copy_(0, ids, ranks.receive(own.new_empty((len(pages), own.shape[1])), 0))


def _ids_of(pages: Sequence[int], ranks: Ranks) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=ranks.device)


def _bytes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory, uint8 [num_pages, bytes]."""
    return [tensor.flatten(1).view(torch.uint8) for tensor in tensors]
