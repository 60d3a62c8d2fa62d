"""Clusters on Dynamo's runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.dynamo import Cluster, cluster_of, wait_for_workers
from support.etcd import Etcd
from support.replicated import ROOM_FOR_ALL
from support.tiny_model_dir import write_tiny_model

# Of a tiny model, whose logits are the same in any company.
SETTINGS = ("weights=float32", "kv_dtype=float32", f"kv_tokens={ROOM_FOR_ALL}", "max_context=8192", "num_threads=1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def cluster(tiny_model: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Without workers yet."""
    with cluster_of(tiny_model, tmp_path, *SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with contextlib.closing(Etcd(tmp_path)) as etcd:
        yield etcd


@pytest.fixture
def etcd_cluster(etcd: Etcd, tiny_model: Path, tmp_path: Path) -> Iterator[Cluster]:
    """As `cluster`, with discovery by etcd."""
    with cluster_of(tiny_model, tmp_path, *SETTINGS, etcd=etcd.url) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def addresses(smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a worker of SmolLM2 with default settings, and of an edge in front of it."""
    with cluster_of(smollm2_dir, tmp_path_factory.mktemp("cluster")) as cluster:
        worker, edge = cluster.start_worker(), cluster.start_edge()
        worker.wait_until_ready()
        edge.wait_until_ready()
        wait_for_workers(edge)
        yield {"worker": worker.address, "edge": edge.address}
