"""Which CPUs each rank has."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from microturn.model.parallel.cpus import neighbours, take_share


def test_a_rank_has_one_socket_and_whole_cores(tmp_path: Path) -> None:
    """As Linux numbers two sockets of two cores: first threads of all cores first, and then the second ones."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu // 2 % 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    assert neighbours(set(range(8)), tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert neighbours({1, 2, 7}, tmp_path) == [1, 2, 7]
    assert neighbours({3, 1}, tmp_path / "nowhere") == [1, 3]


def test_the_shares_of_all_ranks_are_all_cpus() -> None:
    cpus = os.sched_getaffinity(0)

    def share_of(rank: int, size: int) -> set[int]:
        take_share(rank, size)
        return os.sched_getaffinity(0)

    def shares(size: int) -> list[set[int]]:
        # In threads of their own, which end with what they may use.
        found = []
        for rank in range(size):
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(share_of, rank, size).result())
        return found

    assert shares(len(cpus)) == [{cpu} for cpu in neighbours(cpus)]
    assert shares(len(cpus) + 1) == [cpus] * (len(cpus) + 1), "with fewer CPUs than ranks none is bound"
