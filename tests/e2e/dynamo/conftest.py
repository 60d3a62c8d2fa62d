"""A cluster on Dynamo's runtime, without workers yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.dynamo import Cluster, cluster_of
from support.tiny_model_dir import write_tiny_model


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of a tiny model, whose logits are the same in any company."""
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    settings = ("weights=float32", "kv_dtype=float32", "kv_tokens=65536", "max_context=8192", "num_threads=1")
    with cluster_of(model, tmp_path_factory.mktemp("cluster"), *settings) as cluster:
        yield cluster
