"""Some seeds of the simulator. `pytest --seeds` says how many; `make simulate SEEDS=0:10000` runs more of them."""

from __future__ import annotations

import pytest

from simulation.command import outcomes
from simulation.plan import draw_plan
from simulation.run import run
from support import share


def test_whatever_happens_every_invariant_holds(pytestconfig: pytest.Config) -> None:
    seeds = range(pytestconfig.getoption("seeds"))
    told = outcomes(seeds, num_processes=share.num_threads())
    found = {seed: outcome.message for seed, outcome in told if outcome.invariant}
    assert not found, f"make simulate SEEDS={min(found)}: {found[min(found)]}"


@pytest.mark.parametrize("seed", [3, 8, 17])
def test_a_run_is_a_function_of_its_seed(seed: int) -> None:
    assert run(draw_plan(seed)) == run(draw_plan(seed))
