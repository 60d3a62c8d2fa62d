"""The KV cache in memory.

Layers are divided into groups (see `LayerGroups`), and a page belongs to one group. Each slot of a group has one tensor
``[num_pages, 2, num_kv_heads, …]``, which holds the keys and values of the group's layer in that slot; `page_layout`
defines the order of a head's elements in a page. A model whose layers all have the same window is one group,
and each layer has a tensor. The keys of one head in a page are contiguous.

Position ``p`` of a session is in its page ``pages[p // page_size]`` at offset ``p % page_size``, where `pages` are its
pages for the layer's group.

Elements are float32, bfloat16, int8, or on a GPU float8 (e4m3), where the keys of a layer have a scale, and its values:
those are no part of a page. In int8 each head's key and value of each token has a float32 scale of its own, in a second
tensor ``[num_pages, 2, num_kv_heads, page_size]``. Both are views of the same memory: a page's scales lie behind its
elements, so that it is read in one piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.copier import CopyShare, InPlaceCopier, KVCopier
from microturn.kv.gpu_copier import StreamCopier
from microturn.kv.image import KVImage, PagePart
from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.layer_pages import SCALE_DTYPE, LayerPages, num_scales
from microturn.kv.page_layout import PageLayout
from microturn.kv.quantization import UNSCALED, LayerScales
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
        float8: scales of each layer in float8; None has none.
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
        float8: Sequence[LayerScales] | None = None,
    ) -> None:
        assert float8 is None or dtype == torch.float8_e4m3fn, "other types have no scales of layers"
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        self.groups = LayerGroups.one(layers) if groups is None else groups
        self.layout = layout
        self._slots = []
        for slot in self.groups.slots:
            self._slots.append(LayerPages.empty(num_pages, page_size, slot, dtype, layout, device))
        float8 = [UNSCALED] * len(layers) if float8 is None else float8
        self.layers = [
            replace(self._slots[place.slot], float8=of) for place, of in zip(self.groups.places, float8, strict=True)
        ]
        if new_copier is None:
            new_copier = StreamCopier.on if self.tensors[0].is_cuda else InPlaceCopier
        self._copier = new_copier(self.tensors)
        self.state_track: StateTrack | None = None
        self.states: StatePages | None = None
        if state_bytes:
            of_pages = self.bytes_per_page, self.groups.num_groups, page_size
            self.state_track = StateTrack.of(state_bytes, *of_pages)
            self.states = StatePages(self.tensors, self.state_track.num_groups)

    @staticmethod
    def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of KV that one token takes over all layers, scales included."""
        return sum(
            2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize
            + 2 * num_scales(layer, dtype) * SCALE_DTYPE.itemsize
            for layer in layers
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the pages; the first axis of each is that of the pages."""
        return [tensor for slot in self._slots for tensor in slot.tensors]

    # ---- offload and load of pages ------------------------------------------------------------------------------

    @cached_property
    def page_parts(self) -> list[PagePart]:
        """The parts of a page, one per tensor."""
        return [replace(part, scales=self.scales) for part in self._copier.parts]

    @cached_property
    def scales(self) -> str:
        """Tells the scales of all layers in float8, which are not in the pages; empty where they are 1."""
        scales = [layer.float8 for layer in self.layers]
        if all(of == UNSCALED for of in scales):
            return ""
        return hashlib.blake2b(repr([tuple(of) for of in scales]).encode(), digest_size=16).hexdigest()

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
        image = self._copier.new_image(num_pages)
        image.parts = tuple(self.page_parts)
        return image

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
