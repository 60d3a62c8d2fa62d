"""The figures of a machine that limit sessions, and the data sheets of some; nothing here was measured by us."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The machine on which a model runs.

    Attributes:
        name: for people.
        memory_bytes: memory for weights and KV.
        bandwidth: read bandwidth of that memory in bytes per second.
        flops: operations per second of matrix products; None ignores them.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float | None = None


# Memory, bandwidth, and dense products in bfloat16, as stated by the manufacturer.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine("l4", 24e9, 300e9, 121e12),
        Machine("l40s", 48e9, 864e9, 362e12),
        Machine("a100", 80e9, 2.039e12, 312e12),
        Machine("h100", 80e9, 3.35e12, 989e12),
        Machine("h200", 141e9, 4.8e12, 989e12),
        Machine("b200", 180e9, 8.0e12, 2250e12),
    )
}
