"""The pages of one layer, or of the layers that share a slot: how keys and values lie in them, and in which type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.image import PagePart
from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.quantization import UNSCALED, LayerScales, dequantize, quantize

SCALE_DTYPE = torch.float32


@dataclass(frozen=True)
class LayerPages:
    """All pages of the layers of one slot.

    Attributes:
        elements: [num_pages, 2, num_kv_heads, *shape], the shape and order of a head as in the layout.
        scales: float32 [num_pages, 2, num_scales, page_size], with a scale per head in int8 and none otherwise.
        layout: order of the elements.
        float8: scales of the layer in float8; they are not in the pages, which mean nothing without them.
    """

    elements: Tensor
    scales: Tensor
    layout: PageLayout = PageLayout.HND
    float8: LayerScales = UNSCALED

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
        scales = PagePart((2, num_scales(shape, dtype), page_size), SCALE_DTYPE)
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

    def encode(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Converts keys or values, floats [tokens, num_kv_heads, head_dim], to the pages' type; `scale` is of float8.

        Returns:
            [tokens, num_kv_heads, head_dim] and scales [tokens, num_scales].
        """
        dtype = self.elements.dtype
        if dtype == torch.int8:
            return quantize(x.float())
        if dtype == torch.float8_e4m3fn:
            largest = torch.finfo(dtype).max
            # By a tensor: by a number, torch on a GPU would multiply by its inverse, which rounds twice.
            x = (x.float() / torch.full((), scale, device=x.device)).clamp(-largest, largest)
        return x.to(dtype), self.scales.new_empty(len(x), 0)

    def put(self, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes the keys and values of some tokens into their pages.

        Args:
            pages: int64 [tokens].
            offsets: int64 [tokens], positions in these pages.
            keys: floats [tokens, num_kv_heads, head_dim]; `values` likewise.
        """
        of_keys, of_values = self._views(self.elements)
        new_keys, self.scales[pages, 0, :, offsets] = self.encode(keys, self.float8.keys)
        new_values, self.scales[pages, 1, :, offsets] = self.encode(values, self.float8.values)
        terms = of_values.shape[3]
        of_keys[pages, :, offsets] = _indexable(new_keys).view(*new_keys.shape[:2], of_keys.shape[3], terms)
        of_values[pages, :, offsets // terms, offsets % terms] = _indexable(new_values)

    def decode(self, page_ids: Tensor) -> Tensor:
        """Keys and values of some pages, float32 [pages, 2, num_kv_heads, page_size, head_dim] in this order."""
        keys, values = self._views(_indexable(self.elements)[page_ids])
        elements = torch.stack((keys.flatten(3), values.flatten(2, 3)), 1).view(self.elements.dtype)
        if elements.dtype == torch.int8:
            return dequantize(elements, self.scales[page_ids])
        decoded = elements.float()
        if elements.dtype == torch.float8_e4m3fn:
            for part, scale in enumerate(self.float8):
                decoded[:, part] *= scale
        return decoded

    def _views(self, elements: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of pages with these elements, by token."""
        elements, page_size = _indexable(elements), self.scales.shape[3]
        return self.layout.keys(elements, page_size), self.layout.values(elements, page_size)


def num_scales(layer: LayerShape, dtype: torch.dtype) -> int:
    """Scales of a token's keys, or values, in a layer."""
    return layer.num_kv_heads if dtype == torch.int8 else 0


def _flat(pages: Tensor) -> Tensor:
    """A tensor's memory [n], with what lies between its pages."""
    length = (len(pages) - 1) * pages.stride(0) + pages[0].numel() if pages.numel() else 0
    return pages.as_strided((length,), (1,))


def _indexable(elements: Tensor) -> Tensor:
    """The same memory, with 8-bit floats as integers: not every device can index tensors of 8-bit floats."""
    return elements.view(torch.uint8) if elements.dtype == torch.float8_e4m3fn else elements
