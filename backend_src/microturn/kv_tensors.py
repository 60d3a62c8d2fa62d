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
