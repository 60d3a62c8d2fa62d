"""Clusters on Dynamo's runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.dynamo import Cluster, cluster_of, wait_for_workers
from support.share import IN_FLOAT32
from support.tiny_model_dir import write_tiny_model


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without workers yet; of a tiny model, whose logits are the same in any company."""
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    settings = ("weights=float32", "kv_dtype=float32", "kv_tokens=65536", "max_context=8192", "num_threads=1")
    with cluster_of(model, tmp_path_factory.mktemp("cluster"), *settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def addresses(smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a worker of SmolLM2, and of an edge in front of it."""
    with cluster_of(smollm2_dir, tmp_path_factory.mktemp("cluster"), *IN_FLOAT32) as cluster:
        worker, edge = cluster.start_worker(), cluster.start_edge()
        worker.wait_until_ready()
        edge.wait_until_ready()
        wait_for_workers(edge)
        yield {"worker": worker.address, "edge": edge.address}
