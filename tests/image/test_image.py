"""The Dockerfile, built and run on a stand-in for NVIDIA's base: `make image-test` (ten minutes, 15 GB of disk).

What only the real base could show is not seen here: its Python 3.12, CUDA, and its Triton.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from image.buildah import Buildah, pip_volumes
from image.stub_base import build_stub_base
from microturn.zoo.cache import default_cache_dir
from support.processes import kill_all
from support.tiny_model_dir import write_tiny_model

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/microturn"
SUPERVISOR = ["/opt/microturn/bin/python", "/opt/microturn/bin/microturn", "serve"]
TALK = """
from microturn_client import Client, Tokens
with Client("127.0.0.1:8001", timeout_s=120) as client, client.session() as session:
    session.append("The first thing I do")
    ids = [i for event in session.turn(" is to", max_tokens=8) if isinstance(event, Tokens) for i in event.ids]
    print(client.model_info().model_name, len(ids), session.context_len > 8)
"""


@pytest.fixture(scope="module")
def buildah() -> Iterator[Buildah]:
    """With the image, built from nothing; only the base system's files are kept for the next time."""
    directory = default_cache_dir() / "image-test"
    directory.mkdir(parents=True, exist_ok=True)
    storage = Path(tempfile.mkdtemp(prefix="storage-", dir=directory))  # one that was killed leaves mounts in its own
    with contextlib.closing(Buildah(storage)) as buildah:
        arguments = {"BASE": build_stub_base(buildah, directory), "MODEL": "smollm2-135m"}
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        buildah("bud", "--layers=false", *pip_volumes(), *options, "--tag", IMAGE, str(ROOT))
        yield buildah


@pytest.fixture
def network() -> Iterator[int]:
    """A process in a network that has nothing but a loopback of its own."""
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as holder:
        try:
            host = Path("/proc/self/ns/net").readlink()
            while Path(f"/proc/{holder.pid}/ns/net").readlink() == host:
                time.sleep(0.01)
            subprocess.run(["nsenter", f"--target={holder.pid}", "--net", "ip", "link", "set", "lo", "up"], check=True)
            yield holder.pid
        finally:
            holder.kill()


@contextlib.contextmanager
def running(buildah: Buildah, network: int, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A container of the image as an engine would run it: its user, its entry point, ready by its own health check."""
    config = buildah.config(IMAGE)
    container = buildah("from", IMAGE)
    with buildah.start(
        network, container, list(options), [*config["Entrypoint"], "--snapshot-dir=/snapshots"]
    ) as server:
        try:
            _kind, *health_check = config["Healthcheck"]["Test"]
            deadline_s = time.monotonic() + 300
            while buildah.run(network, container, *health_check)[0] != 0:
                assert server.poll() is None, server.communicate()[0]
                assert time.monotonic() < deadline_s
                time.sleep(1)
            yield container, server
        finally:
            kill_all(_tree(server))


def _tree(server: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []


def talk(buildah: Buildah, network: int, container: str) -> str:
    exit_code, answer = buildah.run(network, container, "python", "-c", TALK)
    assert exit_code == 0, answer
    return answer.strip()


def test_the_built_in_model_is_served_by_a_user_without_rights_and_without_a_network(
    buildah: Buildah, network: int
) -> None:
    with running(buildah, network) as (container, server):
        assert talk(buildah, network, container) == "model 8 True"
        (triton,) = [process for process in _tree(server) if process.name() == "tritonserver"]
        assert triton.uids().real == triton.gids().real == 1000
        for directory in ("/opt/microturn", "/opt/tritonserver", "/model"):
            assert buildah.run(network, container, "touch", f"{directory}/mine")[0] != 0
        # PID 1 of a container is the supervisor; here buildah stands above it.
        (supervisor,) = [process for process in _tree(server) if process.cmdline()[:3] == SUPERVISOR]
        supervisor.send_signal(signal.SIGTERM)
        said, _ = server.communicate(timeout=60)
        assert server.returncode == 0, said
        assert "saved 0 sessions" in said


def test_a_model_in_a_volume_is_served_instead(buildah: Buildah, network: int, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    for file in model.iterdir():
        file.chmod(0o644)  # for the container's user
    with running(buildah, network, f"--volume={model}:/model:ro") as (container, _server):
        assert talk(buildah, network, container) == "model 8 True"
