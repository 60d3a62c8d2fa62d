"""What ``microturn serve`` refuses: one line on stderr, exit code 1, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.served import Start

REPOSITORY = Path(__file__).parent / "light_repository"


def refusal(*arguments: str, **environment: str) -> str:
    """Runs ``microturn serve`` to its refusal; returns the line."""
    served = subprocess.run(
        [sys.executable, "-m", "microturn.cli", "serve", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert served.returncode == 1
    assert served.stdout == ""
    harmless = (
        "microturn: starting Triton",
        "microturn: removed what a killed run had left",
        "microturn: the model process died while it loaded the model (out of memory?); restarting",
        "settings: ",
    )
    lines = [line for line in served.stderr.splitlines() if not line.startswith(harmless)]
    assert len(lines) == 1, lines
    assert lines[0].startswith("microturn: error: ")
    return lines[0].removeprefix("microturn: error: ")


@pytest.fixture
def ports() -> list[str]:
    """Free ports, as options."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    numbers = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return [f"--{name}-port={n}" for name, n in zip(("grpc", "http", "metrics", "health"), numbers, strict=True)]


@pytest.fixture
def repository(tmp_path: Path) -> Callable[[str], Path]:
    """Copies of the light model with a fault."""

    def with_fault(fault: str) -> Path:
        path = tmp_path / fault
        shutil.copytree(REPOSITORY, path)
        config = path / "streaming_llm" / "config.pbtxt"
        config.write_text(config.read_text().replace('"none"', f'"{fault}"'))
        return path

    return with_fault


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port", "--metrics-port", "--health-port"])
def test_a_port_in_use(ports, option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal("--model-repository", str(REPOSITORY), *ports, f"{option}={port}")
    assert line == f"port {port} is in use: stop what listens there, or choose another port with {option}"


def test_an_unknown_setting_names_the_nearest(ports):
    assert refusal("--set", "page_sise=16", *ports) == "unknown setting 'page_sise': did you mean 'page_size'?"


def test_a_setting_out_of_its_range(ports):
    assert refusal("--set", "page_size=0", *ports) == "setting 'page_size' is at least 1, not 0"


def test_a_setting_without_a_value(ports):
    assert refusal("--set", "page_size", *ports) == "--set takes key=value, not 'page_size'"


def test_a_missing_model_repository(ports, tmp_path):
    assert refusal(f"--model-repository={tmp_path}", *ports).startswith(f"no model repository in {tmp_path}: ")


def test_a_model_directory_that_is_not_there(ports, tmp_path):
    line = refusal(f"--model-repository={REPOSITORY}", f"--model={tmp_path / 'absent'}", *ports)
    assert str(tmp_path / "absent") in line


def test_a_triton_server_on_path_that_cannot_run_python_models(ports, tmp_path):
    (tmp_path / "tritonserver").touch(mode=0o755)
    line = refusal(f"--model-repository={REPOSITORY}", *ports, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert line.startswith(f"the Triton server in {tmp_path.parent} has no Python backend: ")


def test_a_model_that_raises_is_explained_by_its_exception(ports, repository):
    line = refusal(f"--model-repository={repository('raise')}", *ports)
    assert line == "Triton did not start: ValueError: the weights are not what they should be"


def test_a_model_process_that_dies_while_it_loads(ports, repository):
    line = refusal(f"--model-repository={repository('exit')}", *ports)
    reason = "the model process died while it loaded the model (out of memory?)"
    assert line == f"gave up after 5 failures in a row, the last: {reason}"


def test_a_model_process_that_dies_at_the_first_start_is_started_again(serve: Start, repository) -> None:
    """A stub that died of boost::interprocess::lock_exception, which is not lasting, ended `microturn serve`."""
    served = serve(f"--model-repository={repository('exit once')}")
    served.wait_for_line("microturn: the model process died while it loaded the model (out of memory?); restarting")
    served.wait_until_ready()
    assert served.turn(1) == ["output_ids", "status"]


def test_a_model_that_cannot_be_imported(ports, repository):
    path = repository("import")
    (path / "streaming_llm" / "1" / "model.py").write_text("import no_such_package\n")
    line = refusal(f"--model-repository={path}", *ports)
    assert line == "Triton did not start: ModuleNotFoundError: No module named 'no_such_package'"


def test_a_model_that_loads_and_refuses_every_turn(ports, repository):
    line = refusal(f"--model-repository={repository('refuse')}", "--health-timeout-s=5", *ports)
    assert line == "Triton did not start: the model does not answer: INTERNAL: the engine has stopped"


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--no-such-flag", "unrecognized option '--no-such-flag'"),
        ("--http-thread-count=many", "Invalid option value. Got many"),
        ("--log-warning=maybe", "invalid value for bool option: maybe"),
    ],
)
def test_an_argument_that_triton_does_not_take(ports, argument, reason):
    line = refusal(f"--model-repository={REPOSITORY}", f"--triton-arg={argument}", *ports)
    assert line == f"Triton did not start: {reason}"


def test_the_embedded_server_is_not_exposed_by_accident(ports):
    """The wheel's Triton has published remote faults, and nothing kept it from listening on all interfaces."""
    line = refusal(f"--model-repository={REPOSITORY}", "--host=0.0.0.0", *ports)
    assert line.startswith("--host 0.0.0.0: the Triton server of the wheel nvidia-pytriton is 24.10, ")
    assert "--expose-embedded-triton" in line


def test_only_what_sessions_need_is_open(serve: Start) -> None:
    """Whoever reached the gRPC port could load another model in place of ours; HTTP was open beside it."""
    served = serve()
    served.wait_until_ready()
    triton = service_pb2_grpc.GRPCInferenceServiceStub(served.channel)
    assert triton.ServerReady(service_pb2.ServerReadyRequest(), timeout=10).ready
    assert triton.ModelReady(service_pb2.ModelReadyRequest(name="streaming_llm"), timeout=10).ready
    assert triton.ModelConfig(service_pb2.ModelConfigRequest(name="streaming_llm"), timeout=10).config.name
    closed = [
        (triton.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest(model_name="streaming_llm")),
        (triton.SystemSharedMemoryStatus, service_pb2.SystemSharedMemoryStatusRequest()),
        (triton.ModelStatistics, service_pb2.ModelStatisticsRequest()),
        (triton.TraceSetting, service_pb2.TraceSettingRequest()),
        (triton.LogSettings, service_pb2.LogSettingsRequest()),
    ]
    for call, request in closed:
        with pytest.raises(grpc.RpcError) as refused:
            call(request, timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "restricted" in refused.value.details()
    (server,) = [process for process in served.tree() if process.name() == "tritonserver"]
    listening = {connection.laddr.port for connection in server.net_connections() if connection.status == "LISTEN"}
    assert listening == {served.grpc_port, served.metrics_port}
