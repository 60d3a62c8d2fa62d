from __future__ import annotations

from microturn.serve.restarts import RestartBudget


def test_the_first_restart_is_immediate_and_haste_fades():
    budget = RestartBudget()
    assert [budget.next_delay_s(1.0) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, None]
    assert budget.num_quick_failures == 5


def test_a_server_that_ran_well_starts_over():
    budget = RestartBudget()
    for _ in range(4):
        budget.next_delay_s(0.0)
    assert budget.next_delay_s(31.0) == 0.0
    assert budget.next_delay_s(0.0) == 0.5
