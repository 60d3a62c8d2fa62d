"""The KV cache in memory, and the one place that draws its layout.

Per layer one tensor ``[num_pages, 2, page_size, num_kv_heads, head_dim]`` (FlashInfer's NHD layout)::

    page 7:  K  | token 0: head 0, head 1, … | token 1: … | … | token page_size-1 |
             V  | token 0: head 0, head 1, … | token 1: … | … | token page_size-1 |

Position ``p`` of a session lives in its page ``pages[p // page_size]`` at offset ``p % page_size``. All layers use the
same page ids. Who owns which page is the pool's knowledge, not ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from microturn.kv_image import KVImage, PagePart


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token, and how far back it looks.

    Attributes:
        num_kv_heads: key and value heads.
        head_dim: size of a head.
        window: positions visible to a query, itself included; None is all of them.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


class KVTensors:
    """The pages of all layers.

    Args:
        layers: shape of each layer, in the model's order.
        num_pages: pages in each layer's tensor.
        page_size: tokens in a page.
        dtype: type of the elements.
        device: where the pages live.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.page_size = page_size
        self.layers = [
            torch.empty(num_pages, 2, page_size, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=device)
            for layer in layers
        ]

    @staticmethod
    def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of KV that one token takes over all layers."""
        return sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers) * dtype.itemsize

    # ---- pages out of the pool and into it -----------------------------------------------------------------------

    @property
    def page_parts(self) -> list[PagePart]:
        """What a page consists of."""
        return [PagePart(tuple(tensor.shape[1:]), tensor.dtype) for tensor in self._tensors]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers."""
        return sum(part.num_bytes for part in self.page_parts)

    def new_image(self, num_pages: int) -> KVImage:
        """Host memory for so many pages; nothing stands in it yet."""
        return KVImage(self.page_parts, num_pages, is_pinned=self._tensors[0].is_cuda)

    def read(self, pages: Sequence[int], image: KVImage | None = None, first: int = 0) -> KVImage:
        """Copies pages out, bit by bit.

        Args:
            pages: their ids.
            image: where to; None is a new one of just these pages.
            first: index in the image of the first page.
        """
        image = self.new_image(len(pages)) if image is None else image
        ids = self._ids(pages)
        for tensor, part in zip(self._tensors, image.part(first, first + len(pages)), strict=True):
            if tensor.is_cuda:
                part.copy_(tensor.index_select(0, ids))
            else:
                torch.index_select(tensor, 0, ids, out=part)
        return image

    def write(self, pages: Sequence[int], image: KVImage, first: int = 0) -> None:
        """Copies pages of an image, from its index `first` on, into these."""
        ids = self._ids(pages)
        for tensor, part in zip(self._tensors, image.part(first, first + len(pages)), strict=True):
            tensor.index_copy_(0, ids, part.to(tensor.device))

    @property
    def _tensors(self) -> list[Tensor]:
        """All that pages consist of; the first axis of each tensor is that of the pages."""
        return self.layers

    def _ids(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._tensors[0].device)
