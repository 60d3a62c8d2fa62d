"""Workers and edges that find each other by a real etcd: what test_workers.py has with files, and etcd's own death."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from microturn_client import Client, Session, Status, TurnEnd
from support.dynamo import Cluster, Process, wait_for_workers
from support.dynamo_talk import Talk, started
from support.etcd import Etcd
from support.replicated import PATIENT, TURN, said

DYNAMOS_LEASE_S = 10.0
# For an orchestrator to be told, in place of Dynamo's two minutes.
REFUSED_WITHIN_S = 9.0


def ends(process: Process, timeout_s: float = 30.0) -> str:
    """The error with which a process ends by itself."""
    assert process.process.wait(timeout_s) == 1, process.said
    process.close()
    (error,) = [line for line in process.said if line.startswith("microturn: error: ")]
    return error


def turn_of(session: Session, number: int) -> Status:
    session.append(said(0, number))
    *_, end = session.turn(**TURN)
    assert isinstance(end, TurnEnd)
    return end.status


async def test_sessions_outlive_workers_edges_and_etcd(etcd: Etcd, etcd_cluster: Cluster, num_talkers: int) -> None:
    workers, edges = started(etcd_cluster, 3)
    longest_s: dict[str, float] = {}

    async def disturb(talk: Talk) -> None:
        await talk.all_have_heard(2)
        longest_s.update(await talk.lose(edges[0], workers[0], frozen=workers[1]))
        assert longest_s["worker frozen"] < DYNAMOS_LEASE_S, "as long as if only its lease had told"
        workers[1].process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(wait_for_workers, edges[1], len(workers) + 1)
        await talk.all_have_spoken_again()

        etcd.kill()
        killed_s = time.monotonic()
        late = etcd_cluster.start_edge()
        assert f"with etcd at {etcd.url}: " in await asyncio.to_thread(ends, late)
        longest_s["an edge without etcd: error"] = time.monotonic() - killed_s
        assert longest_s["an edge without etcd: error"] < REFUSED_WITHIN_S
        longest_s["etcd away"] = talk.took_since(killed_s, time.monotonic())
        assert longest_s["etcd away"] < longest_s["an edge without etcd: error"], "a turn waited for etcd"
        etcd.start()

        workers.append(etcd_cluster.start_worker("--grace-s=60"))
        await asyncio.to_thread(workers[-1].wait_until_ready)
        await asyncio.to_thread(wait_for_workers, edges[1], len(workers) + 1)
        assert await asyncio.to_thread(workers[1].stop) == 0
        await talk.all_have_spoken_again()

    talk = Talk(num_talkers)
    await talk.run(edges, disturb)
    await talk.check_all_there(workers[2])
    print("; ".join(f"{what}: {took_s:.3f} s at most" for what, took_s in longest_s.items()))


def test_namespaces_models_and_an_etcd_that_is_away_and_comes_back_without_its_data(
    etcd: Etcd, etcd_cluster: Cluster, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The namespace `brief` has leases that end while etcd is away, `brief-not` our own, which etcd then forgets."""
    another_model = tmp_path / "another"
    shutil.copytree(tiny_model, another_model)
    config = json.loads((another_model / "config.json").read_text())
    (another_model / "config.json").write_text(json.dumps(config | {"rope_theta": 20_000.0}))

    def start_worker(namespace: str, model: Path) -> Process:
        options = [f"--model={model}", f"--snapshot-dir={tmp_path / namespace}", "--grace-s=2"]
        return etcd_cluster.start_worker(f"--namespace={namespace}", *options)

    worker, edge = start_worker("brief-not", tiny_model), etcd_cluster.start_edge("--namespace=brief-not")
    with monkeypatch.context() as environment:
        environment.setenv("ETCD_LEASE_TTL", "2")
        brief_worker, brief_edge = start_worker("brief", another_model), etcd_cluster.start_edge("--namespace=brief")
    for one in (worker, edge, brief_worker, brief_edge):
        one.wait_until_ready()
    wait_for_workers(edge)
    wait_for_workers(brief_edge)
    # Sessions went to the one model or the other, as they came.
    stranger = ends(start_worker("brief-not", another_model))
    assert "namespace 'brief-not' has another model: worker worker-1 " in stranger
    for place, name in ((edge, "worker-1"), (brief_edge, "worker-2")):
        assert [line.split()[-1] for line in place.said if "found worker" in line] == [name]

    with (
        Client(edge.address, recovery=PATIENT) as client,
        Client(brief_edge.address, recovery=PATIENT) as brief_client,
        client.session() as session,
        brief_client.session() as brief_session,
    ):
        assert turn_of(session, 0).context_len == turn_of(brief_session, 0).context_len == 12
        etcd.kill()
        killed_s = time.monotonic()
        assert "Dynamo" in ends(brief_worker)
        # It stayed, found no worker any more, and looked healthy to whoever watched its process.
        assert "lost its discovery" in ends(brief_edge)
        away_s = time.monotonic() - killed_s
        assert away_s > DYNAMOS_LEASE_S, "the others would not have outlived it with Dynamo's own lease"
        end = turn_of(session, 1)
        assert (end.context_len, end.rebuilt) == (24, False)

        etcd.forget()
        etcd.start()
        begun_s = time.monotonic()
        start_worker("brief-not", tiny_model)
        start_worker("brief", another_model)
        etcd_cluster.start_edge("--namespace=brief", f"--grpc-port={brief_edge.address.rpartition(':')[2]}")
        end = turn_of(brief_session, 1)
        assert (end.context_len, end.rebuilt) == (24, False), "not from its snapshot"
        assert "discovery has forgotten this worker" in ends(worker)
        forgotten_s = time.monotonic() - begun_s
        end = turn_of(session, 2)
        assert (end.context_len, end.rebuilt) == (36, False), "not from its snapshot"
    print(f"leases of 2 s: ended {away_s:.1f} s after etcd; without its data: {forgotten_s:.1f} s after its return")
