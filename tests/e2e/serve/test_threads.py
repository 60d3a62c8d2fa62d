"""Where the threads of a model process may run."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from microturn.serve.options import default_model_repository
from microturn_client import Client
from support.served import Served

EVERY_CPU = os.sched_getaffinity(0)
YES_OR_NO = {"enum": ["yes", "no"]}


@pytest.mark.skipif(len(EVERY_CPU) == 1, reason="there is one CPU")
def test_threads_that_compute_are_bound_to_a_cpu_each_and_no_others(
    serve: Callable[..., Served], smollm2_dir: str
) -> None:
    """Under the default, a thread for each CPU; the engine starts one for grammars when it needs it."""
    served = serve(f"--model-repository={default_model_repository()}", f"--model={smollm2_dir}", "--set", "device=cpu")
    served.wait_until_ready(300)  # kernels may have to be compiled
    threads = served.model_process().num_threads()
    with Client(served.address) as client, client.session() as session:
        assert session.ask("Is water wet?", json_schema=YES_OR_NO, max_tokens=8).text() in ('"yes"', '"no"')
        cpus = [os.sched_getaffinity(thread.id) for thread in served.model_process().threads()]
    assert len(cpus) > threads
    assert any(f"{len(EVERY_CPU)} threads are bound to a CPU each" in line for line in served.said)
    assert sorted(min(of) for of in cpus if of != EVERY_CPU) == sorted(EVERY_CPU)
    assert all(len(of) == 1 for of in cpus if of != EVERY_CPU)
