"""The command line of ``microturn serve`` as one frozen dataclass.

Only syntax is checked here; whether a port is free or a model exists is checked where it is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from microturn.serve import console
from microturn.serve.errors import ServeError
from microturn.settings import absolute_place

DEFAULT_MODEL = "smollm2-135m"

# Settings that the supervisor needs too have an option.
_OWN_OPTION = {
    "model_dir": "--model",
    "snapshot_dir": "--snapshot-dir",
    "admin_socket": "--admin-socket",
    "peer_address": "--peer-port",
}


@dataclass(frozen=True)
class ServeOptions:
    """What to serve, and where.

    Attributes:
        model: a model directory, a GGUF file or the name of an embedded model; None is the default model, where the
            repository's model takes one at all.
        model_repository: holds ``streaming_llm``.
        settings: overrides of the engine's settings, still as text.
        host: the address that all ports listen on.
        exposes_embedded_triton: whether the host may be other than loopback with the server inside the wheel
            nvidia-pytriton.
        http_port: of Triton's HTTP API; None leaves that closed.
        peer_port: where sessions of other servers are taken; None leaves that closed.
        run_dir: where the run directory is made; None is the system's temporary directory.
        admin_socket: where the admin socket is; None is in the run directory.
        snapshot_dir: where live sessions are saved on a stop, and found again; None is nowhere.
        log_dir: where Triton's whole log goes; None sends its warnings to stderr.
        log_format: of the model's log lines on stderr: ``text``, ``json``, or ``auto``, which is text on a terminal.
        triton_args: passed on to Triton after our own arguments.
        grace_s: what a stop may take before Triton is killed.
        drain_notice_s: the part of it in which sessions go on while health is NOT_SERVING, so that proxies notice.
        health_timeout_s: how long without an answered health turn until the server is restarted.
        start_timeout_s: what loading the model may take.
    """

    model: str | None
    model_repository: Path
    settings: Mapping[str, str]
    host: str
    exposes_embedded_triton: bool
    grpc_port: int
    http_port: int | None
    metrics_port: int
    health_port: int
    http_health_port: int | None
    peer_port: int | None
    run_dir: Path | None
    admin_socket: Path | None
    snapshot_dir: str | None
    log_dir: Path | None
    log_format: str
    triton_args: tuple[str, ...]
    grace_s: float
    drain_notice_s: float
    health_timeout_s: float
    start_timeout_s: float

    def ports(self) -> dict[str, int]:
        """Every open port by the name of its option."""
        ports = {
            "--grpc-port": self.grpc_port,
            "--http-port": self.http_port,
            "--metrics-port": self.metrics_port,
            "--health-port": self.health_port,
            "--http-health-port": self.http_health_port,
            "--peer-port": self.peer_port,
        }
        return {option: port for option, port in ports.items() if port is not None}


_FIELDS = {field.name for field in fields(ServeOptions)}


def default_model_repository() -> Path:
    """The repository that comes with the package (in a checkout, a link to the one at its top)."""
    return Path(__file__).resolve().parents[1] / "model_repository"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``microturn serve``."""
    what = parser.add_argument_group("what to serve")
    what.add_argument(
        "--model",
        metavar="DIR|FILE|NAME",
        help=f"a Hugging Face model directory, a GGUF file, or an embedded model: smollm2-135m, gemma3-270m "
        f"(default: {DEFAULT_MODEL})",
    )
    what.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="override a setting of the engine; repeatable"
    )
    what.add_argument(
        "--model-repository",
        metavar="DIR",
        type=Path,
        default=default_model_repository(),
        help="a Triton model repository with a model 'streaming_llm' (default: the one that comes with microturn)",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    where.add_argument(
        "--expose-embedded-triton",
        dest="exposes_embedded_triton",
        action="store_true",
        help="allow a --host other than loopback, though the Triton server of the wheel nvidia-pytriton has published "
        "remote faults",
    )
    where.add_argument("--grpc-port", type=port, default=8001, help="sessions (default: %(default)s)")
    where.add_argument("--http-port", type=port, help="Triton's HTTP API, without sessions (default: closed)")
    where.add_argument("--metrics-port", type=port, default=8002, help="Prometheus metrics (default: %(default)s)")
    where.add_argument("--health-port", type=port, default=8003, help="gRPC health service (default: %(default)s)")
    where.add_argument(
        "--http-health-port", type=port, help="health over HTTP, by which Envoy places sessions (default: closed)"
    )
    where.add_argument(
        "--peer-port",
        type=port,
        help="take sessions from other servers of the model, which the setting 'peers' names (default: closed)",
    )
    where.add_argument("--run-dir", metavar="DIR", type=Path, help="where to make the temporary run directory")
    where.add_argument(
        "--admin-socket",
        metavar="PATH",
        type=_absolute,
        help="socket for 'microturn sessions' (default: in the run directory, where that command finds it)",
    )
    where.add_argument(
        "--log-dir",
        metavar="DIR",
        type=Path,
        help="write Triton's whole log to DIR/triton.log (default: its warnings and errors go to stderr)",
    )
    where.add_argument(
        "--log-format",
        choices=("auto", "text", "json"),
        default="auto",
        help="of the model's log lines on stderr; auto is text on a terminal, else JSON (default: %(default)s)",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--snapshot-dir",
        metavar="DIR|s3://BUCKET/PREFIX",
        type=absolute_place,
        help="on SIGTERM, save live sessions there; the next start restores them",
    )
    how.add_argument(
        "--triton-arg", metavar="ARG", action="append", default=[], help="pass ARG on to tritonserver; repeatable"
    )
    how.add_argument(
        "--grace-s", type=seconds, default=10.0, help="on SIGTERM, kill Triton after so long (default: %(default)g)"
    )
    how.add_argument(
        "--drain-notice-s",
        type=seconds,
        default=0.0,
        help="on SIGTERM, go on for so long while health is NOT_SERVING, so that proxies notice (default: %(default)g)",
    )
    how.add_argument(
        "--health-timeout-s",
        type=seconds,
        default=10.0,
        help="restart when no health turn was answered for so long (default: %(default)g)",
    )
    how.add_argument(
        "--start-timeout-s",
        type=seconds,
        default=600.0,
        help="give up when the model is not ready after so long (default: %(default)g)",
    )


def is_text(log_format: str) -> bool:
    """Whether log lines are text on stderr, by `--log-format`."""
    return console.stderr_is_terminal() if log_format == "auto" else log_format == "text"


def read_options(arguments: argparse.Namespace) -> ServeOptions:
    """Converts what argparse has parsed.

    Raises:
        ServeError: a ``--set`` that is not ``key=value``, or one of a setting that has an option.
    """
    return ServeOptions(
        **{name: value for name, value in vars(arguments).items() if name in _FIELDS},
        settings=read_settings(arguments.set),
        triton_args=tuple(arguments.triton_arg),
    )


def read_settings(assignments: Sequence[str]) -> dict[str, str]:
    """Settings given as ``key=value``.

    Raises:
        ServeError: see `read_options`.
    """
    settings: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise ServeError(f"--set takes key=value, not '{assignment}'")
        if name in _OWN_OPTION:
            raise ServeError(f"use {_OWN_OPTION[name]}, not --set {name}")
        settings[name] = value
    return settings


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def port(text: str) -> int:
    """A port, for argparse."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 1 to 65535, not '{text}'")
    return int(text)


def seconds(text: str) -> float:
    """A time above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e6:  # also refuses nan
        raise argparse.ArgumentTypeError(f"seconds above 0 are wanted, not '{text}'")
    return number
