"""The order of the elements of a page: the definition of each layout.

HND, FlashInfer's: tokens one behind another, so that the vectors of one head are contiguous::

    page 7:  K  | head 0: token 0, token 1, …, token page_size-1 | head 1: … | … |
             V  | head 0: token 0, token 1, …, token page_size-1 | head 1: … | … |

PANELS, the native kernel's, for pages of a multiple of `PANEL_TOKENS` tokens: a head of a page is two panels, which the
kernel reads from their beginning to their end and multiplies as they are. A vector of keys has the same elements of
neighbouring tokens, so that scores of several tokens are added in its lanes, and never across them. A lane has 32 bits:
elements of 16 bits lie in pairs and those of 8 bits by four, which CPUs multiply and add at once (as vLLM has keys with
x = 2)::

    page 7:  K  | head 0: elements 0 and 1 of token 0, …, of token page_size-1; elements 2 and 3 of token 0, …; … | … |
             V  | head 0: element 0 of tokens 0 and 1, …, the last element of tokens 0 and 1; tokens 2 and 3; …   | … |

Elements of 32 bits lie there one by one: K has all tokens' element 0, then all tokens' element 1; V is as in HND.

Behind a page's elements in int8 lie their scales (see `kv.tensors`).

Keys in int8 are rotated in panels before they are rounded (see `model.cpu.rotation`), and the kernel rotates queries.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

# A page of panels has a multiple of so many tokens: the lanes of the longest vectors.
PANEL_TOKENS = 16

# A head in panels has a multiple of so many elements: those of a lane in int8.
PANEL_ELEMENTS = 4

# What lies together in panels has so many bytes.
LANE_BYTES = 4


class PageLayout(Enum):
    """A layout: the axes of a page's elements behind that of the heads, and their order."""

    HND = "HND"
    PANELS = "panels"

    def terms(self, dtype: torch.dtype) -> int:
        """Elements of a head that lie together for each token, and tokens that lie together for each element."""
        return LANE_BYTES // dtype.itemsize if self is PageLayout.PANELS else 1

    def shape(self, page_size: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape of one head's keys or values in a page: each layout has another, as snapshots tell it."""
        if self is PageLayout.HND:
            return page_size, head_dim
        assert page_size % PANEL_TOKENS == 0, "panels are of whole vectors of tokens"
        assert head_dim % PANEL_ELEMENTS == 0, "panels are of whole lanes"
        terms = self.terms(dtype)
        return page_size * head_dim // terms, terms

    def keys(self, elements: Tensor, page_size: int) -> Tensor:
        """The keys of all pages, as a view [num_pages, num_kv_heads, page_size, head_dim // terms, terms].

        Args:
            elements: [num_pages, 2, num_kv_heads, *shape].
            page_size: tokens in a page.
        """
        if self is PageLayout.HND:
            return elements[:, 0, ..., None]
        return elements[:, 0].view(*elements[:, 0].shape[:2], -1, page_size, elements.shape[-1]).transpose(2, 3)

    def values(self, elements: Tensor, page_size: int) -> Tensor:
        """The values of all pages, as a view [num_pages, num_kv_heads, page_size // terms, terms, head_dim]."""
        if self is PageLayout.HND:
            return elements[:, 1, :, :, None]
        terms = elements.shape[-1]
        return elements[:, 1].view(*elements[:, 1].shape[:2], page_size // terms, -1, terms).transpose(3, 4)
