"""What rank 0 has the others do, in the order in which it does its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from microturn.kv.copier import KVCopier
from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch

NewCopier = Callable[[Sequence[Tensor]], KVCopier]


@dataclass(frozen=True)
class Load:
    """Loads a share of a model, in place of the one before, and answers when it is there.

    Attributes:
        model_dir: of the model.
        weights: their type, ``int8`` or ``float32``.
        num_threads: of a pass.
    """

    model_dir: str
    weights: str
    num_threads: int


@dataclass(frozen=True)
class Allocate:
    """Allocates the pages of a share: see `KVTensors`."""

    num_pages: int
    page_size: int
    kv_dtype: torch.dtype
    layout: PageLayout

    def new_kv(self, shapes: Sequence[LayerShape], new_copier: NewCopier | None = None) -> KVTensors:
        """The pages, of layers of these shapes."""
        return KVTensors(
            shapes,
            self.num_pages,
            self.page_size,
            self.kv_dtype,
            groups=LayerGroups.of(shapes),
            layout=self.layout,
            new_copier=new_copier,
        )


@dataclass(frozen=True)
class Pass:
    """Runs a batch, whose embedded tokens rank 0 shares.

    Attributes:
        batch: without the tokens themselves.
    """

    batch: Batch

    @classmethod
    def of(cls, batch: Batch) -> Self:
        return cls(Batch([row._replace(token_ids=range(len(row.token_ids)), embeds=()) for row in batch.rows]))


@dataclass(frozen=True)
class ReadPages:
    """Sends pages to rank 0, tensor after tensor."""

    pages: Sequence[int]


@dataclass(frozen=True)
class WritePages:
    """Receives pages from rank 0, tensor after tensor."""

    pages: Sequence[int]


Command = Load | Allocate | Pass | ReadPages | WritePages
