"""docs/existing-triton.md: the packages as wheels, the copied model, a bare tritonserver, a session."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from microturn.serve.child import free_ports
from microturn.serve.triton_server import find_triton_server
from microturn_client import Client, MicroturnError, Recovery, Tokens, Unavailable
from support.processes import model_process_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "existing-triton.md").read_text()


@pytest.fixture(scope="module")
def bare_triton(smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tritonserver that nobody supervises, with the model copied into somebody's repository."""
    tmp_path = tmp_path_factory.mktemp("bare")
    python = _python_with_wheels(tmp_path / "environment")
    repository = tmp_path / "repository"
    repository.mkdir()
    subprocess.run(["cp", "-r", str(ROOT / "model_repository" / "streaming_llm"), str(repository)], check=True)
    config = repository / "streaming_llm" / "config.pbtxt"
    text = config.read_text()
    model_dir = re.search(r"parameters \{ key: \"model_dir\".*", text)
    assert model_dir is not None
    config.write_text(text.replace(model_dir[0], model_dir[0].replace('""', f'"{smollm2_dir}"')))

    triton = find_triton_server()
    tree = tmp_path / "triton"
    backends = triton.link_backends(tree)
    grpc_port, http_port, metrics_port = free_ports(3)
    flags = re.findall(r"--grpc-[a-z0-9-]+=\d+", PAGE)
    assert len(flags) == 4
    process = subprocess.Popen(
        [
            str(triton.binary),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name=bare{grpc_port}",
            f"--grpc-port={grpc_port}",
            f"--http-port={http_port}",
            f"--metrics-port={metrics_port}",
            *(f"--{kind}-address=127.0.0.1" for kind in ("grpc", "http", "metrics")),
            "--allow-gpu-metrics=false",
            "--exit-timeout-secs=2",  # it waits so long for a model process that is dead
            *flags,
        ],
        # The stub takes the packages of the first python3 on PATH.
        env=triton.environment(tree) | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"},
    )
    try:
        yield f"127.0.0.1:{grpc_port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_the_copied_model_serves_sessions_in_a_bare_triton(bare_triton: str) -> None:
    with Client(bare_triton) as client:
        _wait_until_ready(client)
        with client.session() as session:
            session.append("The first thing I do")
            events = list(session.turn(" in the morning is", max_tokens=8))
            text = "".join(event.text for event in events if isinstance(event, Tokens))
            assert text.strip()
            assert session.context_len == 9 + 8


def test_a_model_process_that_died_is_noticed_though_triton_says_nothing(bare_triton: str) -> None:
    """Its stream lives on. The turn ended by its own time limit only, and so did every turn behind it."""
    impatient = Recovery(ask_again_after_s=0.5, give_up_after_s=1.0)
    with Client(bare_triton, recovery=impatient, timeout_s=60) as client:
        _wait_until_ready(client)
        session = client.session()
        turn = session.turn("Once upon a time", max_tokens=4000, ignore_eos=True)
        next(turn)
        began_s = time.monotonic()
        model_process_of(bare_triton).kill()
        with pytest.raises(Unavailable, match="not healthy"):
            turn.wait()
        assert time.monotonic() - began_s < 10


def _python_with_wheels(environment: Path) -> Path:
    """A Python with our two wheels; what they depend on it takes from the environment of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--no-deps", str(ROOT / "client"), str(ROOT / "backend_src")], check=True)
    found = subprocess.run(
        [python, "-c", "import microturn; print(microturn.__file__)"], capture_output=True, text=True
    )
    assert found.stdout.startswith(str(environment)), found
    return python


def _wait_until_ready(client: Client) -> None:
    deadline_s = time.monotonic() + 240  # a first start compiles kernels
    while True:
        try:
            with client.session() as session:
                session.append([1])
                return
        except MicroturnError:
            assert time.monotonic() < deadline_s, "the server did not get ready"
            time.sleep(0.5)
