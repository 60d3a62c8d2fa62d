"""Workers and edges that find each other by a real etcd: what test_workers.py has with files, and etcd's own death."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from microturn_client import Client, Session, TurnEnd
from support.dynamo import Cluster, Process, wait_for_workers
from support.dynamo_talk import Talk, started
from support.etcd import Etcd
from support.replicated import PATIENT, TURN, said

# Dynamo's own lease of 10 s does not last so long.
AWAY_S = 12.0
# For an orchestrator to be told, in place of Dynamo's two minutes.
REFUSED_WITHIN_S = 9.0


def ends(process: Process, timeout_s: float = 30.0) -> str:
    """The error with which a process ends by itself."""
    assert process.process.wait(timeout_s) == 1, process.said
    process.close()
    (error,) = [line for line in process.said if line.startswith("microturn: error: ")]
    return error


def turn_of(session: Session, number: int) -> TurnEnd:
    session.append(said(0, number))
    *_, end = session.turn(**TURN)
    assert isinstance(end, TurnEnd)
    return end


async def test_sessions_outlive_workers_edges_and_etcd(etcd: Etcd, etcd_cluster: Cluster) -> None:
    workers, edges = started(etcd_cluster, 3)
    longest_s: dict[str, float] = {}

    async def disturb(talk: Talk) -> None:
        await talk.all_have_heard(2)
        longest_s["edge killed"] = await talk.after(edges[0].kill)
        longest_s["worker killed"] = await talk.after(workers[0].kill)
        longest_s["worker frozen"] = await talk.after(lambda: workers[1].process.send_signal(signal.SIGSTOP))
        assert longest_s["worker frozen"] < 3
        workers[1].process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(wait_for_workers, edges[1], len(workers) + 1)
        await talk.all_have_spoken_again()

        etcd.kill()
        killed_s = time.monotonic()
        late = etcd_cluster.start_edge()
        assert f"with etcd at {etcd.url}: " in await asyncio.to_thread(ends, late)
        longest_s["an edge without etcd: error"] = time.monotonic() - killed_s
        assert longest_s["an edge without etcd: error"] < REFUSED_WITHIN_S
        await asyncio.sleep(killed_s + AWAY_S - time.monotonic())
        longest_s["etcd away"] = talk.took_since(killed_s, time.monotonic())
        assert longest_s["etcd away"] < 3
        etcd.start()

        workers.append(etcd_cluster.start_worker("--grace-s=60"))
        await asyncio.to_thread(workers[-1].wait_until_ready)
        await asyncio.to_thread(wait_for_workers, edges[1], len(workers) + 1)
        assert await asyncio.to_thread(workers[1].stop) == 0
        await talk.all_have_spoken_again()

    talk = Talk()
    await talk.run(edges, disturb)
    await talk.check_same(workers[2])
    for one in talk.heard:
        assert one.context_lens == [12 * n + 12 for n in range(talk.num_turns)]
    print("; ".join(f"{what}: {took_s:.3f} s at most" for what, took_s in longest_s.items()))


def test_a_lease_that_ends_ends_workers_and_edges_which_go_on_from_snapshots(
    etcd: Etcd, etcd_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edge stayed, found no worker any more, and was healthy for whoever watched its process."""
    monkeypatch.setenv("ETCD_LEASE_TTL", "2")
    snapshots = f"--snapshot-dir={tmp_path / 'snapshots'}"
    worker, edge = etcd_cluster.start_worker(snapshots, "--grace-s=2"), etcd_cluster.start_edge()
    for process in (worker, edge):
        process.wait_until_ready()
    wait_for_workers(edge)
    with Client(edge.address, recovery=PATIENT) as client, client.session() as session:
        assert turn_of(session, 0).status.context_len == 12
        etcd.kill()
        killed_s = time.monotonic()
        assert "Dynamo" in ends(worker)
        assert "lost its discovery" in ends(edge)
        print(f"ended {time.monotonic() - killed_s:.1f} s after etcd")
        assert any("saved 1 sessions" in line for line in worker.said), worker.said
        etcd.start()
        etcd_cluster.start_edge(f"--grpc-port={edge.address.rpartition(':')[2]}")
        etcd_cluster.start_worker(snapshots)
        end = turn_of(session, 1)
    assert end.status.context_len == 24
    assert end.status.usage.cached_tokens > 0
    assert not end.status.rebuilt


def test_namespaces_models_and_an_etcd_without_its_data(
    etcd: Etcd, etcd_cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """Two namespaces do not see each other, nor does one take two models: sessions went to the one or the other."""
    another_model = tmp_path / "another"
    shutil.copytree(tiny_model, another_model)
    config = json.loads((another_model / "config.json").read_text())
    (another_model / "config.json").write_text(json.dumps(config | {"rope_theta": 20_000.0}))
    # One name begins with the other.
    namespaces = [("one", ()), ("one-more", (f"--model={another_model}",))]
    workers = [etcd_cluster.start_worker(f"--namespace={name}", *model) for name, model in namespaces]
    edges = [etcd_cluster.start_edge(f"--namespace={name}") for name, _ in namespaces]
    for process in workers + edges:
        process.wait_until_ready()
    for edge in edges:
        wait_for_workers(edge)
    stranger = etcd_cluster.start_worker("--namespace=one", f"--model={another_model}")
    assert "namespace 'one' has another model: worker worker-1 " in ends(stranger)
    for number, edge in enumerate(edges, start=1):
        found = [line for line in edge.said if "found worker" in line]
        assert len(found) == 1
        assert f"worker-{number}" in found[0]

    etcd.kill()
    etcd.forget()
    etcd.start()
    begun_s = time.monotonic()
    etcd_cluster.start_worker("--namespace=one")
    assert "discovery has forgotten this worker" in ends(workers[0])
    print(f"a worker ended {time.monotonic() - begun_s:.1f} s after etcd had lost its data")
    wait_for_workers(edges[0], 2)
