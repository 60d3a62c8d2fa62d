"""The ``microturn`` command. Knows the subcommands; each one's work is imported only when it is asked for."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from microturn import __version__
from microturn.admin.command import add_sessions_arguments
from microturn.bench.command import add_bench_arguments, run_bench
from microturn.model.gpu.kernels_command import add_kernels_arguments, run_kernels
from microturn.planning.check_command import add_check_arguments, run_check
from microturn.planning.command import add_plan_arguments, run_plan
from microturn.serve.dynamo_options import add_edge_arguments, add_worker_arguments
from microturn.serve.options import add_serve_arguments
from microturn_gateway.arguments import add_gateway_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["chat"]:
        return _run_chat(argv[1:])  # the client's own command, with arguments that only the client knows
    arguments = _build_parser().parse_args(argv)
    try:
        exit_code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    return exit_code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="microturn", description="Streaming sessions for language models on Triton.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"microturn {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Start Triton with a model, watch over it and restart it until SIGTERM.",
        usage="microturn serve [--model DIR|FILE|NAME] [--set KEY=VALUE] [options]",
        allow_abbrev=False,
    )
    add_serve_arguments(serve)
    serve.set_defaults(run=_run_serve)
    worker = commands.add_parser(
        "worker",
        help="serve a model to edges, without Triton",
        description="Load a model and serve it to edges that find it by NVIDIA Dynamo's runtime.",
        allow_abbrev=False,
    )
    add_worker_arguments(worker)
    worker.set_defaults(run=_run_worker)
    edge = commands.add_parser(
        "edge",
        help="take clients for workers",
        description="Take clients, and send each session to one of the workers that NVIDIA Dynamo's runtime finds.",
        allow_abbrev=False,
    )
    add_edge_arguments(edge)
    edge.set_defaults(run=_run_edge)
    health = commands.add_parser(
        "health",
        help="ask a server whether it is healthy",
        description="Ask a supervisor's health port. Exits with 0 where the model answers turns.",
        allow_abbrev=False,
    )
    health.add_argument("address", nargs="?", default="127.0.0.1:8003", metavar="HOST:PORT", help="(%(default)s)")
    health.add_argument("--service", default="", help="new-sessions: whether a new session would be opened")
    health.add_argument("--timeout-s", type=float, default=3.0, help="how long to wait (%(default)g)")
    health.set_defaults(run=_run_health)
    gateway = commands.add_parser(
        "gateway",
        help="serve a page and OpenAI's APIs",
        description="Stand before a server as a page for browsers and as OpenAI's realtime and chat APIs.",
        allow_abbrev=False,
    )
    add_gateway_arguments(gateway)
    gateway.set_defaults(run=_run_gateway)
    fetch = commands.add_parser(
        "fetch",
        help="fetch or convert a model",
        description="Fetch and convert a model, or find it in the cache; print its directory.",
    )
    fetch.add_argument("model", metavar="NAME|FILE|DIR", help="an embedded model, a GGUF file or a model directory")
    fetch.set_defaults(run=_run_fetch)
    sessions = commands.add_parser(
        "sessions",
        help="list, export and import sessions",
        description="Look after the sessions of a server that runs on this machine.",
        allow_abbrev=False,
    )
    add_sessions_arguments(sessions)
    sessions.set_defaults(run=_run_sessions)
    commands.add_parser("chat", help="talk with a server from a terminal")
    bench = commands.add_parser(
        "bench",
        help="measure the engine on this machine",
        description="Measure the engine by itself, without Triton.",
        allow_abbrev=False,
    )
    add_bench_arguments(bench)
    bench.set_defaults(run=run_bench)
    check = commands.add_parser(
        "check",
        help="whether and how a model would be served",
        description="Load and check a model as a server would: which layers run it, how fast, in how much memory.",
        allow_abbrev=False,
    )
    add_check_arguments(check)
    check.set_defaults(run=run_check)
    plan = commands.add_parser(
        "plan",
        help="how many sessions a machine serves",
        description="Sessions by memory and by time, from a model's shape and a machine's figures or measured steps.",
        allow_abbrev=False,
    )
    add_plan_arguments(plan)
    plan.set_defaults(run=run_plan)
    kernels = commands.add_parser(
        "kernels",
        help="compile a GPU's kernels ahead of time",
        description="Compile FlashInfer's kernels where there is a CUDA compiler, for GPUs where there is none.",
        allow_abbrev=False,
    )
    add_kernels_arguments(kernels)
    kernels.set_defaults(run=run_kernels)
    return parser


def _run_chat(argv: Sequence[str]) -> int:
    from microturn_client.chat import main as chat

    return chat(argv)


def _run_serve(arguments: argparse.Namespace) -> int:
    from microturn.serve.command import run_serve

    return run_serve(arguments)


def _run_worker(arguments: argparse.Namespace) -> int:
    gc.disable()  # until the model is there: see `HostedEngine.open`
    from microturn.model.lean_imports import import_transformers

    import_transformers()
    from microturn.serve.worker_command import run_worker

    return run_worker(arguments)


def _run_edge(arguments: argparse.Namespace) -> int:
    from microturn.serve.edge_command import run_edge

    return run_edge(arguments)


def _run_health(arguments: argparse.Namespace) -> int:
    from microturn.serve.health import run_health

    return run_health(arguments)


def _run_gateway(arguments: argparse.Namespace) -> int:
    from microturn_gateway.command import run_gateway

    return run_gateway(arguments)


def _run_sessions(arguments: argparse.Namespace) -> int:
    from microturn.admin.command import run_sessions
    from microturn.serve.run_directory import living_runs

    return run_sessions(arguments, living_runs)


def _run_fetch(arguments: argparse.Namespace) -> int:
    from microturn.errors import MicroturnError
    from microturn.zoo.store import resolve_model

    try:
        print(resolve_model(arguments.model))
    except MicroturnError as error:
        print(f"microturn: error: {error.args[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
