"""The KV cache in memory, and the one place that draws its layout.

Layers are cut into groups (see `LayerGroups`), and a page belongs to one group. Each slot of a group has one tensor
``[num_pages, 2, num_kv_heads, page_size, head_dim]`` (FlashInfer's HND layout), where the page keeps what the group's
layer in that slot needs. A model whose layers all see equally far is one group: then each layer has its own tensor::

    page 7:  K  | head 0: token 0, token 1, …, token page_size-1 | head 1: … | … |
             V  | head 0: token 0, token 1, …, token page_size-1 | head 1: … | … |

What attention reads for a head of a page so lies in one piece: on a CPU without AVX-512 reading it is 1.3 times faster
than where the heads of a token lie together.

Position ``p`` of a session lives in its page ``pages[p // page_size]`` at offset ``p % page_size``, where `pages` are
those that it has for the layer's group. Who owns which page is the pool's knowledge, not ours.

Elements are float32, bfloat16, int8, or on a GPU float8 (of the kind e4m3). In int8 each head's key and value of each
token has a float32 scale of its own, in a second tensor whose first axes are those of the first:
``[num_pages, 2, num_kv_heads, page_size]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from microturn.gpu.kv_copier import StreamCopier
from microturn.kv_copier import CopyShare, InPlaceCopier, KVCopier, parts_of
from microturn.kv_image import KVImage, PagePart
from microturn.kv_quantization import dequantize, quantize
from microturn.kv_transfer import Transfer
from microturn.layer_groups import LayerGroups, LayerShape

# How elements lie in a page. Pages that outlive this process say so: with as many heads as tokens in a page, the shape
# of another order is the same.
LAYOUT = "HND"

# The types of elements, by the names that settings have for them.
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
        elements: [num_pages, 2, num_kv_heads, page_size, head_dim].
        scales: float32 [num_pages, 2, num_scales, page_size], with a scale per head in int8 and none otherwise.
    """

    elements: Tensor
    scales: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a page consists of, each [num_pages, ...]: who copies a page copies its part of each of them."""
        return (self.elements, self.scales) if self.scales.shape[2] else (self.elements,)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys or values, floats [tokens, num_kv_heads, head_dim], as the pages keep them.

        Returns:
            [tokens, num_kv_heads, head_dim] and scales [tokens, num_scales].
        """
        dtype = self.elements.dtype
        if dtype == torch.int8:
            return quantize(x.float())
        if dtype == torch.float8_e4m3fn:
            largest = torch.finfo(dtype).max
            x = x.clamp(-largest, largest)  # beyond it there is no number
        return x.to(dtype), self.scales.new_empty(len(x), 0)

    def put(self, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes the keys and values of some tokens where they belong.

        Args:
            pages: int64 [tokens].
            offsets: int64 [tokens], places in these pages.
            keys: floats [tokens, num_kv_heads, head_dim]; `values` likewise.
        """
        for part, new in enumerate((keys, values)):
            elements, self.scales[pages, part, :, offsets] = self.encode(new)
            _indexable(self.elements)[pages, part, :, offsets] = _indexable(elements)

    def decode(self, page_ids: Tensor) -> Tensor:
        """What some pages keep, float32 [pages, 2, num_kv_heads, page_size, head_dim]."""
        elements = _indexable(self.elements)[page_ids].view(self.elements.dtype)
        return dequantize(elements, self.scales[page_ids]) if elements.dtype == torch.int8 else elements.float()


class KVTensors:
    """The pages of all layers.

    Attributes:
        num_pages: pages in each tensor.
        device: where they live.
        groups: which pages are a layer's.
        layers: for each layer, in the model's order, the tensors in which its pages are; other groups' pages too.

    Args:
        layers: shape of each layer, in the model's order.
        num_pages: pages in each tensor.
        page_size: tokens in a page.
        dtype: type of the elements, one of `KV_DTYPES`.
        device: where the pages live.
        groups: of the layers; None is one group of all.
        new_copier: makes what copies pages out and in, given all that they consist of; None is what the device takes.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        groups: LayerGroups | None = None,
        new_copier: Callable[[Sequence[Tensor]], KVCopier] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        self.groups = LayerGroups.one(layers) if groups is None else groups
        self._slots = []
        for slot in self.groups.slots:
            heads = (num_pages, 2, slot.num_kv_heads, page_size)
            elements = torch.empty(*heads, slot.head_dim, dtype=dtype, device=device)
            scales = torch.empty(num_pages, 2, _num_scales(slot, dtype), page_size, dtype=_SCALE_DTYPE, device=device)
            self._slots.append(LayerPages(elements, scales))
        self.layers = [self._slots[place.slot] for place in self.groups.places]
        if new_copier is None:
            new_copier = StreamCopier.on if self._tensors[0].is_cuda else InPlaceCopier
        self._copier = new_copier(self._tensors)

    @staticmethod
    def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of KV that one token takes over all layers, scales included."""
        return sum(
            2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize
            + 2 * _num_scales(layer, dtype) * _SCALE_DTYPE.itemsize
            for layer in layers
        )

    # ---- pages out of the pool and into it -----------------------------------------------------------------------

    @property
    def page_parts(self) -> list[PagePart]:
        """What a page consists of."""
        return parts_of(self._tensors)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all slots."""
        return sum(part.num_bytes for part in self.page_parts)

    @property
    def share(self) -> CopyShare:
        """How many pages may be copied between two steps."""
        return self._copier.share

    def new_image(self, num_pages: int) -> KVImage:
        """Host memory for so many pages; nothing stands in it yet."""
        return self._copier.new_image(num_pages)

    def image_bytes(self, num_pages: int) -> int:
        """What an image of so many pages takes in host memory."""
        return self._copier.image_bytes(num_pages)

    def reserve_host_memory(self, num_bytes: int) -> None:
        """Gets host memory for images that are to come, where it takes long to get."""
        self._copier.reserve(num_bytes)

    def read(self, pages: Sequence[int], image: KVImage | None = None, first: int = 0) -> KVImage:
        """Copies pages out, bit by bit; they may be given up at once.

        Args:
            pages: their ids.
            image: where to; None is a new one of just these pages.
            first: index in the image of the first page.

        Returns:
            The image, which is complete when its `filling` is done.
        """
        image = self.new_image(len(pages)) if image is None else image
        self._copier.read(pages, image, first)
        return image

    def write(self, pages: Sequence[int], image: KVImage, first: int = 0) -> Transfer:
        """Copies pages of an image, from its index `first` on, into these.

        Nobody may use what stands in them before the copy is done; who gives them up sooner has it precede the steps.
        """
        return self._copier.write(pages, image, first)

    @property
    def _tensors(self) -> list[Tensor]:
        """All that pages consist of; the first axis of each tensor is that of the pages."""
        return [tensor for slot in self._slots for tensor in slot.tensors]


def _indexable(elements: Tensor) -> Tensor:
    """The same memory; not every device picks numbers of 8 bits out of a tensor where these are floats."""
    return elements.view(torch.uint8) if elements.dtype == torch.float8_e4m3fn else elements


def _num_scales(layer: LayerShape, dtype: torch.dtype) -> int:
    """Scales of a token's keys, or values, in a layer."""
    return layer.num_kv_heads if dtype == torch.int8 else 0
