"""The sections of the benchmark, and the engine that each of them measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from load_tests.bench.gpu.beat import measure_beat
from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.kernels import measure_kernels
from load_tests.bench.gpu.memory import measure_memory
from load_tests.bench.gpu.restore import measure_restore
from load_tests.bench.gpu.sampling import measure_sampling
from load_tests.bench.gpu.steps import measure_decode, watch_steps
from load_tests.bench.gpu.subject import Subject
from load_tests.bench.gpu.turns import measure_turns
from microturn.settings import Settings

# Beyond the longest context, for what turns append to it.
_ROOM = 512
_HOST_TIER_BYTES = 20 << 30


def served(base: Settings, extent: Extent) -> Settings:
    """An engine on all of the device's memory.

    Args:
        base: what it must have in any case.
        extent: what is measured.
    """
    return replace(base, max_context=max(*extent.context_lens, 24 * extent.num_turns) + _ROOM)


def served_in_float8(base: Settings, extent: Extent) -> Settings:
    """The same, with KV in 8 bits."""
    return replace(served(base, extent), kv_dtype="float8")


def served_from_host(base: Settings, extent: Extent) -> Settings:
    """An engine on a pool for a few sessions, the others in host memory."""
    longest = max(extent.context_lens) + _ROOM
    return replace(
        base,
        max_context=longest,
        kv_tokens=extent.num_in_pool * longest,
        host_tier_bytes=_HOST_TIER_BYTES,
    )


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        settings: of its engine.
        measure: does it; what it returns is what `json.dumps` takes.
    """

    settings: Callable[[Settings, Extent], Settings]
    measure: Callable[[Subject, Extent], dict[str, object]]


# Those of one engine stand together.
SECTIONS: Mapping[str, Section] = {
    "memory": Section(served, measure_memory),
    "decode": Section(served, measure_decode),
    "turns": Section(served, measure_turns),
    "steady": Section(served, watch_steps),
    "beat": Section(served, measure_beat),
    "kernels": Section(served, measure_kernels),
    "sampling": Section(served, measure_sampling),
    "float8-decode": Section(served_in_float8, measure_decode),
    "float8-turns": Section(served_in_float8, measure_turns),
    "float8-beat": Section(served_in_float8, measure_beat),
    "restore": Section(served_from_host, measure_restore),
}
