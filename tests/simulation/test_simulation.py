"""Some seeds of the simulator. `pytest --seeds` says how many; `make simulate SEEDS=0:10000` runs more of them."""

from __future__ import annotations

import pytest

from simulation.command import outcomes
from simulation.plan import draw_plan
from simulation.run import run


def test_whatever_happens_every_invariant_holds(pytestconfig: pytest.Config) -> None:
    seeds = range(pytestconfig.getoption("seeds"))
    found = {seed: outcome.message for seed, outcome in outcomes(seeds, num_processes=2) if outcome.invariant}
    assert not found, f"make simulate SEEDS={min(found)}: {found[min(found)]}"


@pytest.mark.parametrize("seed", [1, 20, 106, 342, 2744])
def test_what_was_found_once_is_not_found_again(seed: int) -> None:
    """Turns that share a prefix in a small pool; counts of tokens that a branch shared with its parent; interrupts that
    were refused for a gap, and turns that were."""
    outcome = run(draw_plan(seed))
    assert not outcome.invariant, outcome.message


@pytest.mark.parametrize("seed", [3, 8, 17])
def test_a_run_is_a_function_of_its_seed(seed: int) -> None:
    assert run(draw_plan(seed)) == run(draw_plan(seed))
