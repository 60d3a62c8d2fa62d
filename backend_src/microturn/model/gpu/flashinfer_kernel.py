"""One FlashInfer wrapper: plans a step's pages on the host, and runs the kernel for layers with the same attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from microturn.kv.layer_groups import LayerShape
from microturn.kv.layer_pages import LayerPages
from microturn.kv.transfer import upload
from microturn.model.paged_step import PagedStep

# Size of a plan with fixed rows: 512 rows take 16 KB; by default a wrapper has 8 MB, and as much pinned memory.
_PLAN_BYTES = 256 << 10


class Kernel:
    """A FlashInfer wrapper, for layers with the same attention.

    Args:
        soft_cap: of their scores; None without.
        num_rows: see `FlashInferAttention`; `max_pages` likewise.
        causal: whether a query sees no keys behind its own position.
    """

    def __init__(
        self,
        workspace: Tensor,
        layer: LayerShape,
        soft_cap: float | None,
        num_heads: int,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        *,
        num_rows: int | None = None,
        max_pages: int = 0,
        causal: bool = True,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._device = workspace.device
        self._num_rows = num_rows
        fixed: dict[str, Any] = {}
        if num_rows is not None:
            new = partial(torch.zeros, dtype=torch.int32, device=self._device)
            fixed = {
                "use_cuda_graph": True,
                "qo_indptr_buf": new(num_rows + 1),
                "paged_kv_indptr_buf": new(num_rows + 1),
                "paged_kv_indices_buf": new(max_pages),
                "paged_kv_last_page_len_buf": new(num_rows),
            }
        # The Hopper kernels ("fa3") do not split keys: eight rows would leave half of the GPU idle.
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2", **fixed)
        if fixed:
            plan = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=self._device)
            self._wrapper.reset_workspace_buffer(workspace, plan)
        self._options = {
            "num_qo_heads": num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "head_dim_qk": layer.head_dim,
            "page_size": page_size,
            "causal": causal,
            "sm_scale": 1.0,  # each layer passes its own
            "window_left": -1 if layer.window is None else layer.window - 1,
            "logits_soft_cap": soft_cap,
            "q_data_type": dtype,
            "kv_data_type": kv_dtype,
        }
        self._has_planned: torch.cuda.Event | None = None

    def plan(self, step: PagedStep) -> None:
        if self._has_planned is not None:
            # The wrapper reuses pinned memory from which the last plan may still be copied.
            self._has_planned.synchronize()
        num_missing = 0 if self._num_rows is None else self._num_rows - len(step.context_len)
        last_page_len = (step.context_len - 1) % step.page_size + 1
        self._wrapper.plan(
            torch.from_numpy(np.pad(step.query_indptr, (0, num_missing), mode="edge")),
            torch.from_numpy(np.pad(step.page_indptr, (0, num_missing), mode="edge")),
            upload(torch.from_numpy(step.page_ids), self._device),
            torch.from_numpy(np.pad(last_page_len, (0, num_missing))),
            max_token_per_sequence=int(np.diff(step.query_indptr).max()),
            **self._options,
        )
        self._has_planned = torch.cuda.current_stream(self._device).record_event()

    def run(self, q: Tensor, kv: LayerPages, scale: float) -> Tensor:
        out = torch.empty_like(q)
        self._wrapper.run(q, kv.elements, out=out, q_scale=scale * kv.float8.keys, v_scale=kv.float8.values)
        return out

    def run_with_weight(self, q: Tensor, kv: LayerPages, scale: float) -> tuple[Tensor, Tensor]:
        """The results, and the logarithms of their total weights to the base 2, float32 [tokens, heads]."""
        scales = {"q_scale": scale * kv.float8.keys, "v_scale": kv.float8.values}
        out, weight = self._wrapper.run(q, kv.elements, return_lse=True, **scales)
        return out, weight
