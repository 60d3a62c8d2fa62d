"""Tests of `container_limits`, with directories that look like cgroups."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from microturn.engine.loading import prepare
from microturn.model.cpu import container_limits
from microturn.model.cpu.container_limits import free_memory, num_cpus
from microturn.model.cpu.loading import load
from microturn.settings import Settings
from support.tiny_model_dir import write_tiny_model

GB = 10**9
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where cgroups are, on a machine with 60 GB to spare."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=60 * GB))
    monkeypatch.setattr(container_limits, "_MOUNTED", tmp_path / "cgroup")
    monkeypatch.setattr(container_limits, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path / "cgroup"


def write_cgroup(cgroup: Path, names: tuple[str, str, str], limit: int | str, usage: int, unused_cache: int) -> None:
    cgroup.mkdir(parents=True, exist_ok=True)
    (cgroup / names[0]).write_text(f"{limit}\n")
    (cgroup / names[1]).write_text(f"{usage}\n")
    (cgroup / "memory.stat").write_text(f"anon 1\n{names[2]} {unused_cache}\nactive_file {GB}\n")


def test_a_container_has_what_its_limit_leaves_and_unused_page_cache(mounted: Path) -> None:
    write_cgroup(mounted, V2, 8 * GB, 5 * GB, 2 * GB)
    assert free_memory() == 5 * GB


def test_the_tightest_of_a_process_s_cgroups_counts(mounted: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/system.slice/microturn.service\n")
    write_cgroup(mounted / "system.slice" / "microturn.service", V2, "max", 3 * GB, 0)
    write_cgroup(mounted / "system.slice", V2, 10 * GB, 4 * GB, GB)
    assert free_memory() == 7 * GB
    write_cgroup(mounted / "system.slice" / "microturn.service", V2, 4 * GB, 3 * GB, 0)
    assert free_memory() == GB


@pytest.mark.parametrize("path", ["/", "/kubepods/burstable/pod7/2f5e"])
def test_a_container_of_version_1_is_the_root_that_it_sees(mounted: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "own").write_text(f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/\n")
    write_cgroup(mounted / "memory", V1, 8 * GB, 3 * GB, GB)
    assert free_memory() == 6 * GB
    write_cgroup(mounted / "memory", V1, NO_LIMIT_V1, 3 * GB, GB)
    assert free_memory() == 60 * GB


def test_a_cgroup_that_is_over_its_limit_leaves_nothing(mounted: Path) -> None:
    write_cgroup(mounted, V2, 2 * GB, 3 * GB, 0)
    assert free_memory() == 0


def test_without_a_limit_it_is_what_the_machine_has(mounted: Path, tmp_path: Path) -> None:
    assert free_memory() == 60 * GB
    mounted.mkdir()
    (mounted / "memory.stat").write_text("inactive_file 5\n")  # the root of a machine has no limit
    assert free_memory() == 60 * GB
    (tmp_path / "own").unlink()
    assert free_memory() == 60 * GB


def test_a_pool_that_sizes_itself_takes_half_of_what_a_container_s_limit_leaves(mounted: Path, tmp_path: Path) -> None:
    """It took half of what the node had, and the kernel ended the pod when sessions filled it."""
    tiny = str(write_tiny_model(tmp_path / "tiny"))
    settings = Settings(model_dir=tiny, weights="float32", kv_dtype="float32", attention="torch")
    token_bytes = load(settings).needs.token_bytes
    write_cgroup(mounted, V2, 8 * GB, 8 * GB - 2 * 1000 * token_bytes, 0)
    assert load(settings).kv_tokens == 1000


@pytest.mark.parametrize(("quota", "num"), [("max", 8), ("300000", 3), ("150000", 1), ("50000", 1)])
def test_a_container_computes_with_as_many_threads_as_its_quota_has_cpus(
    mounted: Path, monkeypatch: pytest.MonkeyPatch, quota: str, num: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    mounted.mkdir()
    assert num_cpus() == 8
    (mounted / "cpu.max").write_text(f"{quota} 100000\n")
    assert num_cpus() == num


def test_quotas_of_version_1_count_too(mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "own").write_text("5:cpu,cpuacct:/docker/2f5e\n0::/\n")
    (mounted / "cpu").mkdir(parents=True)
    (mounted / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, num in ((-1, 8), (400_000, 4)):
        (mounted / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert num_cpus() == num


def test_an_engine_has_a_thread_for_each_cpu_of_its_quota(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had one for each of the node: what a pod's quota leaves is used up by threads that wait for each other."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    mounted.mkdir()
    (mounted / "cpu.max").write_text("100000 100000\n")
    tiny = str(write_tiny_model(tmp_path / "tiny"))
    prepared = prepare(Settings(model_dir=tiny, weights="float32", kv_dtype="float32", attention="torch"))
    prepared.loaded.runner.close()
    assert prepared.num_threads == 1
