"""What rank 0 has the others do, in the order in which it does its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from microturn.kv.copier import KVCopier
from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model.parallel.packed_batch import PackedBatch
from microturn.model.rotary import Rotary
from microturn.model.scores import Scores

if TYPE_CHECKING:  # what only a GPU needs
    from microturn.model.gpu.graphs import StepSize

NewCopier = Callable[[Sequence[Tensor]], KVCopier]


@dataclass(frozen=True)
class Load:
    """Loads a share of a model, in place of the one before, and answers when it is there.

    Attributes:
        model_dir: of the model.
        weights: their type, by its name in the settings.
        shapes: KV shape of each layer of the whole model.
        rotary: the angles of its layers, as rank 0 found them.
        num_threads: of a pass on a CPU.
        for_gpu: whether its layers are those for a GPU.
        scores: of each layer, for a GPU.
        compiled_glue: see `Settings`.
    """

    model_dir: str
    weights: str
    shapes: Sequence[LayerShape]
    rotary: Rotary
    num_threads: int = 1
    for_gpu: bool = False
    scores: Sequence[Scores] = ()
    compiled_glue: bool = False


@dataclass(frozen=True)
class Allocate:
    """Allocates the pages of a share, in place of those before: see `KVTensors`, and `GpuRunner` for the others."""

    num_pages: int
    page_size: int
    kv_dtype: torch.dtype
    layout: PageLayout = PageLayout.HND
    has_flashinfer: bool = False
    max_tokens: int = 0

    @property
    def of_gpu_runner(self) -> dict[str, Any]:
        """Arguments of a `GpuRunner`."""
        return {"has_flashinfer": self.has_flashinfer, "max_tokens": self.max_tokens}

    def new_kv(
        self, shapes: Sequence[LayerShape], device: torch.device, new_copier: NewCopier | None = None
    ) -> KVTensors:
        """The pages, of layers of these shapes."""
        return KVTensors(
            shapes,
            self.num_pages,
            self.page_size,
            self.kv_dtype,
            device,
            LayerGroups.of(shapes),
            self.layout,
            new_copier,
        )


@dataclass(frozen=True)
class TellFree:
    """Frees the pages, and has rank 0 gather the free bytes of each GPU."""


@dataclass(frozen=True)
class Capture:
    """Captures passes: see `GpuRunner.capture`."""

    sizes: Sequence[StepSize]
    max_context: int


@dataclass(frozen=True)
class Pass:
    """Runs a batch, whose embedded tokens rank 0 shares.

    Attributes:
        batch: whose tokens they are.
        may_replay: whether it is replayed if a graph holds it.
    """

    batch: PackedBatch
    may_replay: bool


@dataclass(frozen=True)
class ReadPages:
    """Sends pages to rank 0, tensor after tensor."""

    pages: Sequence[int]


@dataclass(frozen=True)
class WritePages:
    """Receives pages from rank 0, tensor after tensor."""

    pages: Sequence[int]


Command = Load | Allocate | TellFree | Capture | Pass | ReadPages | WritePages
