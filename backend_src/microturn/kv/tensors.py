"""The KV cache in memory.

Layers are divided into groups (see `LayerGroups`), and a page belongs to one group. Each slot of a group has one tensor
``[num_pages, 2, num_kv_heads, …]``, which holds the keys and values of the group's layer in that slot; `page_layout`
defines the order of a head's elements in a page. A model whose layers all have the same window is one group,
and each layer has a tensor. The keys of one head in a page are contiguous.

Position ``p`` of a session is in its page ``pages[p // page_size]`` at offset ``p % page_size``, where `pages` are its
pages for the layer's group.

Elements are float32, bfloat16, int8, or on a GPU float8 (e4m3). In int8 each head's key and value of each token has a
float32 scale of its own, in a second tensor ``[num_pages, 2, num_kv_heads, page_size]``. Both are views of the same
memory: a page's scales lie behind its elements, so that it is read in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.copier import CopyShare, InPlaceCopier, KVCopier, parts_of
from microturn.kv.gpu_copier import StreamCopier
from microturn.kv.image import KVImage, PagePart
from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.quantization import dequantize, quantize
from microturn.kv.state_pages import StatePages
from microturn.kv.state_track import StateTrack
from microturn.kv.transfer import Transfer

# Element types by their names in the settings.
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}

_SCALE_DTYPE = torch.float32


@dataclass(frozen=True)
class LayerPages:
    """All pages of the layers of one slot.

    Attributes:
        elements: [num_pages, 2, num_kv_heads, *shape], the shape and order of a head as in the layout.
        scales: float32 [num_pages, 2, num_scales, page_size], with a scale per head in int8 and none otherwise.
        layout: order of the elements.
    """

    elements: Tensor
    scales: Tensor
    layout: PageLayout = PageLayout.HND

    @classmethod
    def empty(
        cls,
        num_pages: int,
        page_size: int,
        shape: LayerShape,
        dtype: torch.dtype,
        layout: PageLayout,
        device: torch.device | str,
    ) -> Self:
        """Uninitialised pages of layers of this shape."""
        elements = PagePart((2, shape.num_kv_heads, *layout.shape(page_size, shape.head_dim, dtype)), dtype)
        scales = PagePart((2, _num_scales(shape, dtype), page_size), _SCALE_DTYPE)
        if not scales.num_bytes:
            memory = torch.empty(num_pages, *elements.shape, dtype=elements.dtype, device=device)
            return cls(memory, memory.new_empty(num_pages, *scales.shape, dtype=scales.dtype), layout)
        to_scales = elements.num_bytes + -elements.num_bytes % scales.dtype.itemsize
        memory = torch.empty(num_pages, to_scales + scales.num_bytes, dtype=torch.uint8, device=device)
        of_elements, of_scales = memory[:, : elements.num_bytes], memory[:, to_scales:]
        return cls(
            of_elements.view(elements.dtype).view(num_pages, *elements.shape),
            of_scales.view(scales.dtype).view(num_pages, *scales.shape),
            layout,
        )

    @cached_property
    def arrays(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The memory from the first element to the last, bfloat16 (which NumPy lacks) as int16, and that of the scales.

        Both are flat, and on a CPU.
        """
        step = self.elements.stride(0) * self.elements.itemsize
        assert step == sum(tensor[0].nbytes for tensor in self.tensors), "kernels know of no gaps"
        is_bfloat16 = self.elements.dtype == torch.bfloat16
        elements = self.elements.view(torch.int16) if is_bfloat16 else self.elements
        return _flat(elements).numpy(), _flat(self.scales).numpy()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the pages, each [num_pages, ...]; a copy of a page takes its part of each."""
        return (self.elements, self.scales) if self.scales.shape[2] else (self.elements,)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Converts keys or values, floats [tokens, num_kv_heads, head_dim], to the pages' type.

        Returns:
            [tokens, num_kv_heads, head_dim] and scales [tokens, num_scales].
        """
        dtype = self.elements.dtype
        if dtype == torch.int8:
            return quantize(x.float())
        if dtype == torch.float8_e4m3fn:
            largest = torch.finfo(dtype).max
            x = x.clamp(-largest, largest)  # the type has no larger number
        return x.to(dtype), self.scales.new_empty(len(x), 0)

    def put(self, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes the keys and values of some tokens into their pages.

        Args:
            pages: int64 [tokens].
            offsets: int64 [tokens], positions in these pages.
            keys: floats [tokens, num_kv_heads, head_dim]; `values` likewise.
        """
        of_keys, of_values = self._views(self.elements)
        new_keys, self.scales[pages, 0, :, offsets] = self.encode(keys)
        new_values, self.scales[pages, 1, :, offsets] = self.encode(values)
        terms = of_values.shape[3]
        of_keys[pages, :, offsets] = _indexable(new_keys).view(*new_keys.shape[:2], of_keys.shape[3], terms)
        of_values[pages, :, offsets // terms, offsets % terms] = _indexable(new_values)

    def decode(self, page_ids: Tensor) -> Tensor:
        """Keys and values of some pages, float32 [pages, 2, num_kv_heads, page_size, head_dim] in this order."""
        keys, values = self._views(_indexable(self.elements)[page_ids])
        elements = torch.stack((keys.flatten(3), values.flatten(2, 3)), 1).view(self.elements.dtype)
        return dequantize(elements, self.scales[page_ids]) if elements.dtype == torch.int8 else elements.float()

    def _views(self, elements: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of pages with these elements, by token."""
        elements, page_size = _indexable(elements), self.scales.shape[3]
        return self.layout.keys(elements, page_size), self.layout.values(elements, page_size)


class KVTensors:
    """The pages of all layers.

    Attributes:
        num_pages: pages in each tensor.
        device: where the pages are.
        groups: which pages belong to a layer.
        layout: order of the elements of a page.
        layers: for each layer, in the model's order, the tensors with its pages; they also hold other groups' pages.
        states: the recurrent states in pages; None without recurrent layers.
        state_track: of an empty session; None likewise.

    Args:
        layers: shape of each layer, in the model's order.
        num_pages: pages in each tensor.
        page_size: tokens in a page.
        dtype: type of the elements, one of `KV_DTYPES`.
        device: where to allocate the pages.
        groups: of the layers; None puts all into one group.
        layout: order of the elements of a page; the native kernel wants PANELS, with a `head_dim` of whole lanes.
        new_copier: makes the copier, given all tensors of the pages; None chooses it by the device.
        state_bytes: of the state of the model's recurrent layers; 0 without any.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        groups: LayerGroups | None = None,
        layout: PageLayout = PageLayout.HND,
        new_copier: Callable[[Sequence[Tensor]], KVCopier] | None = None,
        state_bytes: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        self.groups = LayerGroups.one(layers) if groups is None else groups
        self.layout = layout
        self._slots = []
        for slot in self.groups.slots:
            self._slots.append(LayerPages.empty(num_pages, page_size, slot, dtype, layout, device))
        self.layers = [self._slots[place.slot] for place in self.groups.places]
        if new_copier is None:
            new_copier = StreamCopier.on if self._tensors[0].is_cuda else InPlaceCopier
        self._copier = new_copier(self._tensors)
        self.state_track: StateTrack | None = None
        self.states: StatePages | None = None
        if state_bytes:
            of_pages = self.bytes_per_page, self.groups.num_groups, page_size
            self.state_track = StateTrack.of(state_bytes, *of_pages)
            self.states = StatePages(self._tensors, self.state_track.num_groups)

    @staticmethod
    def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of KV that one token takes over all layers, scales included."""
        return sum(
            2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize
            + 2 * _num_scales(layer, dtype) * _SCALE_DTYPE.itemsize
            for layer in layers
        )

    # ---- offload and load of pages ------------------------------------------------------------------------------

    @property
    def page_parts(self) -> list[PagePart]:
        """The parts of a page, one per tensor."""
        return parts_of(self._tensors)

    def new_state_pages(self, num_tokens: int, unused: Iterator[int]) -> NDArray[np.int32] | None:
        """Pages for the states of a session's first tokens (see `Row.states`), taken from `unused`."""
        if self.state_track is None:
            return None
        num_states, size = -(-num_tokens // self.state_track.block), self.state_track.num_groups
        return np.fromiter(islice(unused, num_states * size), np.int32).reshape(num_states, size)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all slots."""
        return sum(part.num_bytes for part in self.page_parts)

    def state_bytes_of(self, num_tokens: int) -> int:
        """Bytes of the recurrent states that a session of so many tokens keeps at most."""
        return 0 if self.state_track is None else self.state_track.most_pages(num_tokens, 0) * self.bytes_per_page

    @property
    def share(self) -> CopyShare:
        """How many pages may be copied between two steps."""
        return self._copier.share

    def new_image(self, num_pages: int) -> KVImage:
        """Allocates an uninitialised image of `num_pages` pages in host memory."""
        return self._copier.new_image(num_pages)

    @property
    def loads_any_image(self) -> bool:
        """Whether `write` takes images that `new_image` has not made."""
        return self._copier.loads_any_image

    def image_bytes(self, num_pages: int) -> int:
        """Bytes of host memory that an image of `num_pages` pages takes."""
        return self._copier.image_bytes(num_pages)

    def reserve_host_memory(self, num_bytes: int) -> None:
        """Allocates host memory for future images, where allocation is slow."""
        self._copier.reserve(num_bytes)

    def read(self, pages: Sequence[int], image: KVImage | None = None, first: int = 0) -> KVImage:
        """Copies pages to an image; they may be released at once.

        Args:
            pages: page ids.
            image: the target; None is a new one of just these pages.
            first: index of the first page in the image.

        Returns:
            The image, which is complete when its `store_transfer` is done.
        """
        image = self.new_image(len(pages)) if image is None else image
        self._copier.read(pages, image, first)
        return image

    def write(self, pages: Sequence[int], image: KVImage, first: int = 0) -> Transfer:
        """Copies pages of an image, from index `first` on, into these pages of the cache.

        Do not read the pages before the transfer is done; before releasing them sooner, call `precede_steps`.
        """
        return self._copier.write(pages, image, first)

    @property
    def _tensors(self) -> list[Tensor]:
        """All tensors of the pages; the first axis of each is that of the pages."""
        return [tensor for slot in self._slots for tensor in slot.tensors]


def _flat(pages: Tensor) -> Tensor:
    """A tensor's memory [n], with what lies between its pages."""
    length = (len(pages) - 1) * pages.stride(0) + pages[0].numel() if pages.numel() else 0
    return pages.as_strided((length,), (1,))


def _indexable(elements: Tensor) -> Tensor:
    """The same memory, with 8-bit floats as integers: not every device can index tensors of 8-bit floats."""
    return elements.view(torch.uint8) if elements.dtype == torch.float8_e4m3fn else elements


def _num_scales(layer: LayerShape, dtype: torch.dtype) -> int:
    """Scales of a token's keys, or values, in a layer."""
    return layer.num_kv_heads if dtype == torch.int8 else 0
