"""What the product asks of the machine, the time and chance, answered by the world instead while a run lasts."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from microturn.admin import drain, final_save, operations
from microturn.engine import gauges, steps
from microturn.snapshots import file, snapshot
from simulation.world import World
from support.late_draws import late_draw

_TIMED_MODULES = (drain, final_save, operations, file, snapshot, gauges)


@contextlib.contextmanager
def of_world(world: World) -> Iterator[None]:
    """The product's time and chance are the world's."""
    chance = world.random("product")
    clock: Any = SimpleNamespace(**{name: getattr(time, name) for name in dir(time)})
    clock.monotonic = clock.perf_counter = lambda: world.now_s
    clock.time = world.wall_s
    clock.time_ns = lambda: int(world.wall_s() * 1e9)
    clock.sleep = lambda delay_s: world.run_until(world.now_s + delay_s)
    state = random.getstate()
    random.seed(chance.random())
    with contextlib.ExitStack() as patches:
        for module in _TIMED_MODULES:
            if hasattr(module, "time"):
                patches.enter_context(patch.object(module, "time", clock))
        for name, drawn in {
            "randbits": chance.getrandbits,
            "randbelow": chance.randrange,
            "token_bytes": chance.randbytes,
            "token_hex": lambda num_bytes: chance.randbytes(num_bytes).hex(),
        }.items():
            patches.enter_context(patch.object(secrets, name, drawn))
        patches.enter_context(patch.object(final_save, "_NUM_THREADS", 1))
        # The choice of tokens as on a device of its own: it may fail when the tokens are asked for.
        patches.enter_context(patch.object(steps, "draw", late_draw))
        try:
            yield
        finally:
            random.setstate(state)
