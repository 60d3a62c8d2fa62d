"""A model made ready on a real GPU: FlashInfer attends, passes are captured, and the pool takes what memory is left."""

from __future__ import annotations

import pytest
import torch

from microturn.errors import InvalidArgument
from microturn.model.gpu.loading import make_ready
from microturn.settings import Settings
from support import models


def test_the_pool_takes_what_memory_is_left_and_leaves_some() -> None:
    model = models.with_served_heads("llama").cuda()
    loaded = make_ready(model, Settings(max_sessions=16))
    free, total = torch.cuda.mem_get_info()
    assert (loaded.weights, loaded.attention) == ("bfloat16", "flashinfer")
    assert loaded.pool.num_pages * loaded.runner.kv.bytes_per_page > 0.8 * total
    assert free > 256 << 20


def test_where_flashinfer_has_no_kernels_torch_attends_unless_flashinfer_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING"):
        loaded = make_ready(models.llama().cuda(), Settings(kv_tokens=1000, max_context=500))
    assert loaded.attention == "torch"
    assert "attention through torch, which is slow: heads have 12 elements" in caplog.text
    with pytest.raises(InvalidArgument, match="'attention' cannot be flashinfer here: heads have 12 elements"):
        make_ready(models.llama().cuda(), Settings(kv_tokens=1000, max_context=500, attention="flashinfer"))
