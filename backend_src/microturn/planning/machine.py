"""What of a machine decides about sessions, and the data sheets of some. Nothing here was measured by us."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Where a model runs.

    Attributes:
        name: for people.
        memory_bytes: for weights and KV.
        bandwidth: bytes per second at which that memory is read.
        flops: operations per second of its matrix products; None leaves them out of account.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float | None = None


# Memory, its bandwidth, and dense products in bfloat16, as their maker states them.
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
