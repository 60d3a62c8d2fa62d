"""Where a decode step's time goes on the device, kernel by kernel: what to look at where it is far from its roof."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.steps import decode_steps_ms, grown
from load_tests.bench.gpu.subject import Subject

_NUM_TOLD = 15


def measure_kernels(subject: Subject, extent: Extent) -> dict[str, object]:
    """The kernels that took the most time, over some steps of the longest contexts."""
    sessions, context_len = subject.sessions, max(extent.context_lens)
    ids = grown(sessions, extent.steady_rows, context_len)
    is_cuda = subject.loaded.runner.kv.device.type == "cuda"
    decode_steps_ms(sessions, ids, extent.num_steps)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiled:
        steps_ms = decode_steps_ms(sessions, ids, extent.num_steps)
    sessions.end_all()
    total_us: dict[str, float] = {}
    counts: dict[str, int] = {}
    events: Any = profiled.key_averages()
    for event in events:
        total_us[event.key] = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        counts[event.key] = event.count
    most = sorted(total_us, key=lambda name: -total_us[name])[:_NUM_TOLD]
    all_us = sum(total_us.values())
    return {
        "num_rows": len(ids),
        "context_len": context_len,
        "step_ms": sum(steps_ms) / len(steps_ms),
        "kernels": [
            {"name": name[:160], "share": total_us[name] / all_us, "us_each": total_us[name] / counts[name]}
            for name in most
        ],
    }
