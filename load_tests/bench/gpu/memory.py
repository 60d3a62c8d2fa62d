"""What a model and its pages take of the device's memory."""

from __future__ import annotations

from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.subject import Subject


def measure_memory(subject: Subject, extent: Extent) -> dict[str, object]:
    """Bytes; what is neither weights nor pages are graphs, workspaces, and what torch keeps for later."""
    del extent
    runner = subject.loaded.runner
    weight_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in dict.fromkeys(runner.model.parameters())
    )
    page_bytes = runner.kv.num_pages * runner.kv.bytes_per_page
    return {
        "taken_bytes": subject.device_bytes,
        "weight_bytes": weight_bytes,
        "page_bytes": page_bytes,
        "other_bytes": max(0, subject.device_bytes - weight_bytes - page_bytes),
        "num_pool_tokens": subject.num_pool_tokens,
        "pass_weight_bytes": subject.roofline.weight_bytes,
        "kv_bytes_per_token": subject.roofline.kv_bytes_per_token,
        "weights": subject.loaded.weights,
        "attention": subject.loaded.attention,
        "max_batch_tokens": subject.sessions.engine.settings.max_batch_tokens,
        "ready_s": subject.ready_s,
    }
