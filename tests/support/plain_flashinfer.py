"""What FlashInfer's functions compute, in plain torch on a CPU, and with FlashInfer's own signatures and refusals.

It says from page tables alone what must come out, so that what we hand over can be tested where there is no GPU: which
pages, which lengths, which tokens of a padded step. The kernels themselves are tested in tests/gpu.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import flashinfer
import pytest
import torch
from torch import Tensor

from support import projections
from support.recorded_graphs import kernel


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts these in the place of FlashInfer's, and the like in that of our own kernel."""
    for plain in (BatchPrefillWithPagedKVCacheWrapper, merge_state):
        monkeypatch.setattr(flashinfer, plain.__name__, plain)
    projections.install_plain(monkeypatch)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert (kv_layout, backend) == ("HND", "fa2")
        self._is_fixed = use_cuda_graph
        self._buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf)
        self._pages = paged_kv_indices_buf
        self._max_tokens: int | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        pass

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        tables = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        for table in (*tables, paged_kv_indices):
            assert table.dtype == torch.int32
        assert q_data_type in (torch.bfloat16, torch.float16), "FlashInfer knows no other queries"
        assert head_dim_qk in (64, 128, 256)
        lengths = qo_indptr.diff()
        assert (lengths >= 0).all()
        assert max_token_per_sequence == lengths.max()
        num_tokens = int(qo_indptr[-1])
        if self._is_fixed:
            self._max_tokens = num_tokens if self._max_tokens is None else self._max_tokens
            assert num_tokens <= self._max_tokens
            for buffer, table in zip(self._buffers, tables, strict=True):
                buffer.copy_(table)
            self._pages[: len(paged_kv_indices)] = paged_kv_indices
        else:
            self._buffers, self._pages = tables, paged_kv_indices
        self._options = (num_kv_heads, page_size, causal, sm_scale, window_left, logits_soft_cap)
        self._dtypes = q_data_type, kv_data_type
        self._num_tokens = num_tokens

    @kernel
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor,
        *,
        q_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        assert (q.dtype, paged_kv_cache.dtype) == self._dtypes
        if not self._is_fixed:
            assert len(q) == self._num_tokens
        num_kv_heads, page_size, causal, sm_scale, window_left, soft_cap = self._options
        out = torch.full_like(q, torch.nan) if out is None else out.fill_(torch.nan)
        lse = torch.full(q.shape[:2], torch.nan)
        qo_indptr, kv_indptr, last_page_len = (buffer.tolist() for buffer in self._buffers)
        for row, num_last in enumerate(last_page_len):
            first, last = qo_indptr[row : row + 2]
            pages = self._pages[kv_indptr[row] : kv_indptr[row + 1]].long()
            if first == last:
                continue
            context_len = (len(pages) - 1) * page_size + num_last
            cells = paged_kv_cache[pages].float().transpose(2, 3).flatten(0, 0)
            keys, values = (cells[:, part].flatten(0, 1)[:context_len] for part in (0, 1))
            group = q.shape[1] // num_kv_heads
            scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys.repeat_interleave(group, 1))
            scores *= sm_scale * (1.0 if q_scale is None else q_scale)
            scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
            at, query_at = torch.arange(context_len), torch.arange(context_len - (last - first), context_len)[:, None]
            hidden = (at > query_at) if causal else torch.zeros(last - first, context_len, dtype=torch.bool)
            if window_left >= 0:
                hidden |= at < query_at - window_left
            scores.masked_fill_(hidden, -torch.inf)
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))
            out[first:last] = attended.to(out.dtype)
            if v_scale is not None:
                out[first:last] *= v_scale
            lse[first:last] = (scores.logsumexp(-1) / math.log(2)).t()
        return (out, lse) if return_lse else out


@kernel
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    highest = torch.maximum(s_a, s_b)
    a, b = 2.0 ** (s_a - highest), 2.0 ** (s_b - highest)
    merged = (v_a.float() * a[..., None] + v_b.float() * b[..., None]) / (a + b)[..., None]
    return merged.to(v_a.dtype), highest + (a + b).log2()


def parameters_beyond(plain: Any, real: Any) -> set[str]:
    """What a plain function takes and FlashInfer's does not, or not with this default."""
    of_plain, of_real = (inspect.signature(function).parameters for function in (plain, real))
    return {
        name
        for name, parameter in of_plain.items()
        if name not in of_real or of_real[name].default not in (parameter.default, "float16")
    }
