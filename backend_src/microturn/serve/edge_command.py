"""``microturn edge``: takes clients, and sends their sessions to the workers that it finds. It has no state."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from microturn.errors import MicroturnError
from microturn.hosts.dynamo.edge import EdgeFront
from microturn.hosts.dynamo.runtime import run_on_loop, start_runtime
from microturn.hosts.dynamo.workers import Workers
from microturn.hosts.kserve.envelope import MODEL_NAME
from microturn.serve import console
from microturn.serve.errors import ServeError
from microturn.serve.grpc_listening import listen

_HEALTH_EVERY_S = 0.25
_SERVICES = ("", MODEL_NAME)


def run_edge(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a requested stop, 1 after an error, which is one line on stderr.
    """
    logging.basicConfig(level=logging.INFO, format="microturn: %(message)s")
    try:
        run_on_loop(_serve(arguments))
    except (MicroturnError, ServeError) as error:
        console.say(f"error: {error.args[0]}")
        return 1
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    runtime = start_runtime(arguments.host, arguments.etcd)  # keeps the loop waiting where there is no etcd
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    workers = Workers(runtime, arguments.namespace, arguments.lost_after_s)
    front = EdgeFront(workers)
    server = listen(front, arguments.host, arguments.grpc_port)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    watching = await workers.start()
    await server.start()
    gc.freeze()  # what was imported
    console.announce(f"ready: edge {arguments.host}:{arguments.grpc_port}")
    stop, telling = asyncio.create_task(stopped.wait()), asyncio.create_task(_tell_health(servicer, front))
    await asyncio.wait([stop, telling, watching], return_when=asyncio.FIRST_COMPLETED)
    for failed in (telling, watching):
        if failed.done():
            failed.result()
    telling.cancel()
    await servicer.enter_graceful_shutdown()
    await server.stop(grace=arguments.grace_s)
    workers.close()


async def _tell_health(servicer: health.aio.HealthServicer, front: EdgeFront) -> None:
    while True:
        status = (
            health_pb2.HealthCheckResponse.SERVING if front.is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in _SERVICES:
            await servicer.set(service, status)
        await asyncio.sleep(_HEALTH_EVERY_S)
