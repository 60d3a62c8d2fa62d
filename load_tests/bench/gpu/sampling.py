"""What sampling costs: decode steps of many sessions that sample beside those of greedy ones, and a draw alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.steps import decode_steps_ms, grown, length_after
from load_tests.bench.gpu.subject import Subject
from load_tests.bench.results import percentile
from microturn.model.sampler import draw
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions

# The first is what the others are held against.
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
}
_NUM_DRAWS = 20
# A device is kept busy for some 50 ms while draws are enqueued: it must not wait for the host between them.
_BUSY_CYCLES = 100_000_000


def measure_sampling(subject: Subject, extent: Extent) -> dict[str, object]:
    """Steps of as many sessions as there is room for, at the shortest context."""
    sessions, context_len, runner = subject.sessions, min(extent.context_lens), subject.loaded.runner
    length = length_after(context_len, extent.num_steps) + 1
    num_rows = next(number for number in range(max(extent.rows), 0, -1) if subject.has_room(number, length))
    ids = grown(sessions, num_rows, context_len)
    logits = 3 * torch.randn(num_rows, runner.vocab_size, device=runner.kv.device)
    kinds = {}
    for name, options in _KINDS.items():
        p50_ms = percentile(decode_steps_ms(sessions, ids, extent.num_steps, **options), 50)
        draw_ms, host_ms = _draw_ms(logits, TurnOptions(**options))
        kinds[name] = {"p50_ms": p50_ms, "draw_ms": draw_ms, "host_ms": host_ms}
    sessions.end_all()
    for kind in kinds.values():
        kind["over_greedy"] = kind["p50_ms"] / kinds["greedy"]["p50_ms"]
    return {"num_rows": num_rows, "context_len": context_len, "vocab_size": runner.vocab_size, "kinds": kinds}


def _draw_ms(logits: Tensor, options: TurnOptions) -> tuple[float, float]:
    """Milliseconds that a draw takes the device, and that it takes the host to enqueue it; on a CPU twice the same."""
    rows = [SamplingRow(options, 1, position) for position in range(len(logits))]
    if not logits.is_cuda:
        host_ms = _enqueued_ms(logits, rows)
        return host_ms, host_ms
    cuda: Any = torch.cuda  # not all of it has types
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first time pinned memory is taken for so many draws
        draw(logits, rows).sampled()
        cuda._sleep(_BUSY_CYCLES)
        start.record()
        host_ms = _enqueued_ms(logits, rows)
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / _NUM_DRAWS, host_ms


def _enqueued_ms(logits: Tensor, rows: Sequence[SamplingRow]) -> float:
    started_s = time.perf_counter()
    for _ in range(_NUM_DRAWS):
        draw(logits, rows)
    return (time.perf_counter() - started_s) * 1e3 / _NUM_DRAWS
