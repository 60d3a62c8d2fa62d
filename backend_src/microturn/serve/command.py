"""Checks the options, the fastest checks first, and builds the supervisor with its parts."""

from __future__ import annotations

import argparse
import signal
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from microturn.admin.command import SOCKET_NAME
from microturn.errors import MicroturnError
from microturn.serve import console
from microturn.serve.errors import ServeError
from microturn.serve.health import HealthService
from microturn.serve.http_health import HttpHealth
from microturn.serve.model_repository import ModelRepository
from microturn.serve.options import DEFAULT_MODEL, ServeOptions, is_text, read_options
from microturn.serve.ports import check_ports, is_loopback
from microturn.serve.process_tree import become_subreaper
from microturn.serve.published import PUBLISHED, published_parameters
from microturn.serve.run_directory import RunDirectory, remove_leftovers
from microturn.serve.saving import is_busy, save_sessions
from microturn.serve.server_log import ServerLog
from microturn.serve.server_tree import ServerTree
from microturn.serve.supervisor import Supervisor
from microturn.serve.triton_command import triton_command
from microturn.serve.triton_server import TritonServer, find_triton_server
from microturn.settings import Settings
from microturn.zoo.cache import default_cache_dir


def run_serve(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a requested stop, 1 after an error, which is one line on stderr.
    """
    # Until the supervisor handles the signals, both interrupt: a model may be downloading.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = read_options(arguments)
        engine_settings = Settings.from_strings(options.settings)
        check_ports(options.host, options.ports())
        server = find_triton_server()
        _check_exposure(options, server)
        repository = ModelRepository(options.model_repository)
        settings = dict(options.settings)
        if options.model is not None or repository.takes("model_dir"):
            model = options.model or DEFAULT_MODEL
            settings["model_dir"] = _find_model(model)
            if all(repository.takes(parameter) for parameter in PUBLISHED):
                engine_settings = engine_settings.within_slots(repository.num_slots)
                settings |= published_parameters(model, Path(settings["model_dir"]), engine_settings)
        if "check_dir" not in settings and repository.takes("check_dir"):
            settings["check_dir"] = str(default_cache_dir().absolute() / "checks")
        if options.snapshot_dir is not None:
            _check_saves(repository)
            settings["snapshot_dir"] = options.snapshot_dir
        if options.peer_port is not None:
            settings |= _as_peer(options, options.peer_port, engine_settings)
        _supervise(options, server, repository, settings)
    except ServeError as error:
        console.say(f"error: {error}")
        return 1
    except MicroturnError as error:
        console.say(f"error: {error.args[0]}")
        return 1
    except KeyboardInterrupt:
        console.say("stopped before it had started")
    return 0


def _check_exposure(options: ServeOptions, server: TritonServer) -> None:
    if server.is_embedded and not options.exposes_embedded_triton and not is_loopback(options.host):
        raise ServeError(
            f"--host {options.host}: the Triton server of the wheel nvidia-pytriton is 24.10, whose Python backend has "
            "published remote faults (CVE-2025-23319 and others, fixed in 25.07): put a newer tritonserver on PATH, or "
            "listen on loopback, or say --expose-embedded-triton where every client in the network is trusted"
        )


def _find_model(model: str) -> str:
    from microturn.zoo.store import resolve_model  # its imports take seconds

    return str(resolve_model(model).absolute())


def _check_saves(repository: ModelRepository) -> None:
    if not repository.takes("snapshot_dir"):
        raise ServeError("--snapshot-dir: the model of this repository saves no sessions")


def _as_peer(options: ServeOptions, peer_port: int, settings: Settings) -> dict[str, str]:
    """What the engine needs to take sessions; an edge in front of a server reaches it where it listens by default."""
    as_peer = {"peer_address": f"{options.host}:{peer_port}"}
    if not settings.edge_address and options.host != "0.0.0.0":
        as_peer["edge_address"] = f"{options.host}:{options.grpc_port}"
    return as_peer


def _supervise(
    options: ServeOptions, server: TritonServer, repository: ModelRepository, settings: dict[str, str]
) -> None:
    become_subreaper()
    for leftover in remove_leftovers():
        console.say(f"removed what a killed run had left: {leftover}")
    with (
        RunDirectory.create(options.run_dir) as (run, lock),
        ServerLog(options.log_dir, is_text=is_text(options.log_format)) as log,
        HealthService(f"{options.host}:{options.health_port}") as health,
        _http_health(options, health),
    ):
        admin_socket = options.admin_socket or run.path / SOCKET_NAME
        if repository.takes("admin_socket"):
            settings = settings | {"admin_socket": str(admin_socket)}
        repository.write(run.path / "model_repository", settings)
        tree = run.path / "server"
        command = triton_command(
            server.binary,
            options,
            model_repository=run.path / "model_repository",
            backends=server.link_backends(tree),
            shm_prefix=run.shm_prefix,
        )
        environment = server.environment(tree)

        def start_server() -> ServerTree:
            console.say("starting Triton" + (f" with {settings['model_dir']}" if "model_dir" in settings else ""))
            return ServerTree(command, environment, run, lock, log)

        saves = options.snapshot_dir is not None or options.peer_port is not None
        save = partial(save_sessions, admin_socket) if saves else None
        Supervisor(options, start_server, health, log, partial(is_busy, admin_socket), save).run()


def _http_health(options: ServeOptions, health: HealthService) -> AbstractContextManager[object]:
    if options.http_health_port is None:
        return nullcontext()
    return HttpHealth(options.host, options.http_health_port, lambda: health.health)
