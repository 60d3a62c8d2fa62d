"""``microturn health``: queries the health port, for callers that can only run a program (a container engine)."""

from __future__ import annotations

import argparse

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from microturn.serve import console


def run_health(arguments: argparse.Namespace) -> int:
    """Queries once.

    Returns:
        The exit code: 0 for SERVING (by default: the model answers turns), 1 otherwise; the reason is on stderr.
    """
    with grpc.insecure_channel(arguments.address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=arguments.service), timeout=arguments.timeout_s
            )
        except grpc.RpcError as error:
            console.say(f"{arguments.address}: {error.details()}")
            return 1
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    console.say(f"{arguments.address}: {name}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
