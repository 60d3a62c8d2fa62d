"""``microturn worker``: an engine without Triton, which edges find by NVIDIA Dynamo's runtime.

It has one process and no supervisor: what it cannot mend it ends with, for whoever started it to start it again. On
SIGTERM it hands its sessions over to the other workers, or saves them, and tells clients where they are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from microturn.admin.fleet import Fleet
from microturn.errors import MicroturnError
from microturn.hosts.dynamo.runtime import run_on_loop, start_runtime
from microturn.hosts.dynamo.worker import EngineSilentError, WorkerHost
from microturn.hosts.dynamo.workers import Workers
from microturn.hosts.exposition import Exposition
from microturn.hosts.hosted_engine import HostedEngine
from microturn.hosts.kserve.engine_front import EngineFront
from microturn.hosts.kserve.envelope import MODEL_NAME, config_response
from microturn.hosts.reporting import Reporting
from microturn.serve import console
from microturn.serve.errors import ServeError
from microturn.serve.grpc_listening import listen
from microturn.serve.log_text import as_text
from microturn.serve.options import is_text, read_settings
from microturn.serve.published import published_parameters
from microturn.settings import Settings
from microturn.telemetry.log_lines import LogThread
from microturn.zoo.cache import default_cache_dir

# The share of the grace time for handing sessions over and saving them.
_SHARE_OF_SAVING = 0.8


def run_worker(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a requested stop, 1 after an error, which is one line on stderr.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as SIGTERM, it ends a process that still loads at once
    log = LogThread(_TextStream() if is_text(arguments.log_format) else sys.stderr)
    try:
        run_on_loop(_Worker(arguments, log).work())
    except (MicroturnError, ServeError, EngineSilentError) as error:
        console.say(f"error: {error.args[0]}")
        return 1
    finally:
        log.close()
    return 0


class _Worker:
    """The parts of a worker, in the order in which they start."""

    def __init__(self, arguments: argparse.Namespace, log: LogThread) -> None:
        self._arguments = arguments
        self._log = log
        self._stopped = asyncio.Event()

    async def work(self) -> None:
        begun_s = time.monotonic()
        told = self._arguments
        parameters, settings = await asyncio.to_thread(_read, told)
        if "DYN_SYSTEM_PORT" not in os.environ:
            _check_free(told.host, told.metrics_port)
        runtime = start_runtime(told.host, told.etcd, told.metrics_port)
        workers = Workers(runtime, told.namespace, told.lost_after_s)
        watching = await workers.start()
        fleet = Fleet(settings, workers.peer_addresses, route=told.name)
        hosted = await asyncio.to_thread(HostedEngine, settings, fleet)
        exposition = Exposition()
        reporting = Reporting(
            hosted.engine,
            settings,
            self._log,
            exposition.family_type(),
            MODEL_NAME,
            {name: parameters[name] for name in ("model_name", "model_fingerprint")},
            lambda _metrics: None,
        )
        front = EngineFront(hosted.engine, config_response(parameters), reporting.answered, told.name)
        host = WorkerHost(
            runtime, workers, told.name, settings.peer_address, hosted.engine, front, told.engine_timeout_s
        )
        host.expose(exposition.text)
        hosted.open()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopped.set)
        stop = asyncio.create_task(self._stopped.wait())
        try:
            workers.keep_to(hosted.engine.environment.model_fingerprint)
            async with _direct(front, told), _running(host) as serving:
                found = asyncio.create_task(workers.wait_for(told.name))
                await asyncio.wait([found, stop, serving, watching], return_when=asyncio.FIRST_COMPLETED)
                if found.done():
                    runtime.set_health_status(True)
                    console.announce(f"ready in {time.monotonic() - begun_s:.1f} s: worker {told.name}")
                    await asyncio.wait([stop, serving, watching], return_when=asyncio.FIRST_COMPLETED)
                found.cancel()
                failed = [task.exception() for task in (serving, watching) if task.done()]
                # Without discovery, sessions can still be saved.
                if not any(isinstance(error, EngineSilentError) for error in failed):
                    await self._leave(host, hosted)
                for error in filter(None, failed):
                    raise error
        except EngineSilentError as error:
            # Nothing can be closed: threads wait for the engine, and whoever joins them waits as well.
            console.say(f"error: {error.args[0]}")
            self._log.close()
            os._exit(1)
        finally:
            workers.close()
            await asyncio.to_thread(hosted.close)
            reporting.stop()

    async def _leave(self, host: WorkerHost, hosted: HostedEngine) -> None:
        told = self._arguments
        deadline_s = time.monotonic() + told.grace_s
        console.say(f"stopping, for at most {told.grace_s:g} s")
        host.leave()
        await asyncio.sleep(min(told.drain_notice_s, told.grace_s / 2))
        timeout_s = _SHARE_OF_SAVING * (deadline_s - time.monotonic())
        draining = asyncio.to_thread(hosted.operations.answer, {"op": "drain", "timeout_s": timeout_s})
        try:
            done = await draining
        except MicroturnError as error:
            console.say(f"the sessions could not be saved: {error.args[0]}")
        else:
            console.say(f"saved {done['saved']} sessions, {done['moved']} of them on other workers")
        await host.unregister()


def _read(told: argparse.Namespace) -> tuple[dict[str, str], Settings]:
    """The parameters that clients read, and the engine's settings."""
    from transformers.utils.logging import disable_progress_bar  # these imports take seconds

    from microturn.zoo.store import resolve_model

    disable_progress_bar()  # stderr is a log
    values = read_settings(told.set)
    asked = Settings.from_strings(values)
    model_dir = resolve_model(told.model).absolute()
    settings = replace(
        asked,
        model_dir=str(model_dir),
        check_dir=asked.check_dir or str(default_cache_dir().absolute() / "checks"),
        snapshot_dir=told.snapshot_dir or "",
        admin_socket="" if told.admin_socket is None else str(told.admin_socket.absolute()),
        peer_address=f"{told.host}:{told.peer_port}",
    )
    return {"protocol_version": "1", **published_parameters(told.model, model_dir, settings)}, settings


@contextlib.asynccontextmanager
async def _direct(front: EngineFront, told: argparse.Namespace) -> AsyncIterator[None]:
    """Takes clients without an edge, where a port for them is named."""
    if told.grpc_port is None:
        yield
        return
    server = listen(front, told.host, told.grpc_port)
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=None)


def _check_free(host: str, metrics_port: int) -> None:
    """Dynamo says nothing where it cannot listen for HTTP.

    Raises:
        ServeError: the port is in use.
    """
    try:
        socket.create_server((host, metrics_port)).close()
    except OSError as error:
        raise ServeError(f"cannot listen on {host}:{metrics_port} (--metrics-port): {error}") from error


@contextlib.asynccontextmanager
async def _running(host: WorkerHost) -> AsyncIterator[asyncio.Task[None]]:
    serving = asyncio.create_task(host.serve())
    try:
        yield serving
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


class _TextStream:
    """Stderr, for log lines as a person reads them."""

    def write(self, lines: str) -> None:
        for line in lines.splitlines():
            console.write_stderr(as_text(line))

    def flush(self) -> None:
        """Nothing is kept."""
