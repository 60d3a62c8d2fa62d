"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

from load_tests.bench.beat import run_beat
from load_tests.bench.client_cost import run_client_cost
from load_tests.bench.edge import run_edge_cost
from load_tests.bench.endless import run_endless
from load_tests.bench.endless_embeds import run_endless_embeds
from load_tests.bench.families import run_families
from load_tests.bench.float8_types import run_float8
from load_tests.bench.grammars import run_grammars
from load_tests.bench.hand_over import run_hand_over
from load_tests.bench.host_time import run_host_time
from load_tests.bench.kv_types import run_kv
from load_tests.bench.llama_build import build_llama_cpp, built_llama_cpp
from load_tests.bench.load_memory import run_load_memory
from load_tests.bench.overhead import run_overhead
from load_tests.bench.parked import run_parked
from load_tests.bench.plan_check import CASES, run_plan_check
from load_tests.bench.prefixes import run_prefixes
from load_tests.bench.serving import OWN_MODES, Served
from load_tests.bench.speculation import run_speculation
from load_tests.bench.starts import run_starts
from load_tests.bench.telemetry import run_telemetry
from load_tests.bench.tool_loop import run_tool_loop
from load_tests.bench.turns import run_turns
from load_tests.bench.weight_types import run_weights

_PEERS = ("openvino", "vllm", "llama.cpp")


def main() -> None:
    """Runs one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.bench", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a directory or an embedded model (%(default)s)")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    turns = benchmarks.add_parser("turns", help="turn protocol: sessions, and other ways to serve the same")
    turns.add_argument("--sessions", type=int, default=4)
    turns.add_argument("--turns", type=int, default=100)
    turns.add_argument("--sampled-every", type=int, default=25, help="so many-th turns of stateless and plain only")
    beat = benchmarks.add_parser("beat", help="beat protocol: how many sessions are served on time")
    beat.add_argument("--most-sessions", type=int, default=16)
    beat.add_argument("--seconds", type=float, default=20.0, help="of each level")
    for protocol, modes in ((turns, OWN_MODES), (beat, ("session",))):
        protocol.add_argument("--modes", nargs="+", choices=OWN_MODES, default=modes)
        protocol.add_argument("--peers", nargs="*", choices=_PEERS, help="also these; all, if none is named")
        protocol.add_argument("--llama-server", type=Path, help="the program (what `make llama-server` built)")
        protocol.add_argument("--gguf", dest="ggufs", nargs="+", type=Path, help="models that it serves (likewise)")
        protocol.add_argument("--runs", type=int, default=3)
        protocol.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    benchmarks.add_parser("build-llama-cpp", help="build a llama.cpp server into the cache, with its models")
    overhead = benchmarks.add_parser("overhead", help="what server, adapter and client add to the engine")
    overhead.add_argument("--turns", type=int, default=100)
    edge = benchmarks.add_parser("edge", help="what an edge adds to a worker, and Envoy to Triton")
    edge.add_argument("--turns", type=int, default=200)
    benchmarks.add_parser("hand-over", help="how long a turn waits while its session moves to another server")
    starts = benchmarks.add_parser("starts", help="from the start to the first token, and from kill -9 to serving")
    starts.add_argument("--runs", type=int, default=5)
    endless = benchmarks.add_parser("endless", help="one session far beyond its model's positions")
    endless.add_argument("--turns", type=int, default=20_000)
    endless.add_argument("--window-tokens", type=int, default=1000)
    endless.add_argument("--weights", default="auto")
    endless.add_argument("--embeds", type=int, help="so many embeddings a turn in the place of a text")
    endless.add_argument("--layers", type=int, help="of the model, with --embeds: the first ones alone (all)")
    endless.add_argument("--threads", type=int, default=0, help="of a forward pass, with --embeds (all cores)")
    endless.add_argument("--server", action="store_true", help="these through a real server")
    prefixes = benchmarks.add_parser("prefixes", help="many sessions that begin with one long prompt")
    prefixes.add_argument("--sessions", type=int, default=50)
    prefixes.add_argument("--prompt-len", type=int, default=1000)
    kv = benchmarks.add_parser("kv", help="a KV cache in 16 or 8 bits: perplexity of a real text, room and time")
    kv.add_argument("--contexts", type=int, default=6)
    kv.add_argument("--context-len", type=int, default=2048)
    parked = benchmarks.add_parser("parked", help="many parked sessions on a pool for a few: their next turns")
    parked.add_argument("--sessions", type=int, default=500)
    parked.add_argument("--context-len", type=int, default=1000)
    parked.add_argument("--host-mb", type=int, default=2400, help="host memory for KV; the rest goes to files")
    parked.add_argument("--beating", type=int, nargs="*", default=[40, 100], help="sessions that keep a beat")
    weights = benchmarks.add_parser("weights", help="weights in 8 bits: perplexity of a real text, bytes and time")
    weights.add_argument("--contexts", type=int, default=20)
    weights.add_argument("--context-len", type=int, default=512)
    float8 = benchmarks.add_parser("float8", help="8-bit floats of a GPU: perplexity of a real text, on a CPU")
    float8.add_argument("--contexts", type=int, default=10)
    float8.add_argument("--context-len", type=int, default=512)
    families = benchmarks.add_parser("families", help="fast families: decode steps for the bytes that they read")
    families.add_argument("families", nargs="*", help="by their model_type (all)")
    families.add_argument("--steps", type=int, default=60)
    families.add_argument("--weights", choices=("int8", "float32"), default="int8")
    load_memory = benchmarks.add_parser("load-memory", help="memory that a load takes, beside that of serving")
    load_memory.add_argument("models", nargs="*", help="directories, files or names (random ones)")
    speculation = benchmarks.add_parser("speculation", help="drafts by prompt lookup, on texts of several kinds")
    speculation.add_argument("--runs", type=int, default=5)
    grammars = benchmarks.add_parser("grammars", help="what a grammar costs an answer's tokens")
    grammars.add_argument("--vocabularies", nargs="+", default=["smollm2-135m", "gemma3-270m"], help="of these models")
    grammars.add_argument("--answers", type=int, default=40, help="under each grammar")
    grammars.add_argument("--answer-len", type=int, default=100, help="tokens of each at most")
    telemetry = benchmarks.add_parser("telemetry", help="what metrics, log lines and spans take of a step")
    telemetry.add_argument("--phases", type=int, default=24, help="of ten seconds; a multiple of four (%(default)s)")
    tool_loop = benchmarks.add_parser(
        "tool-loop", help="a loop of tools through the gateway, with and without sessions"
    )
    tool_loop.add_argument("--runs", type=int, default=3)
    plan = benchmarks.add_parser("plan", help="what `microturn plan` says of this machine, and what is measured")
    numbers = range(1, len(CASES) + 1)
    plan.add_argument("--cases", type=int, nargs="+", choices=numbers, default=list(numbers), help="(all)")
    client = benchmarks.add_parser("client", help="what the client library costs: many sessions in one process")
    client.add_argument("--sessions", type=int, default=200)
    client.add_argument("--seconds", type=int, default=300)
    client.add_argument("--grpc-sessions", type=int, default=100)
    client.add_argument("--grpc-seconds", type=int, default=30)
    host = benchmarks.add_parser("host", help="what the host takes for a step: this revision beside an earlier one")
    host.add_argument("--before", default="650ea48", help="the earlier revision, this one or later (%(default)s)")
    host.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    match arguments.benchmark:
        case "turns":
            served = _served(arguments, arguments.sessions)
            run_turns(served, _modes(arguments, served), arguments.turns, arguments.runs, arguments.sampled_every)
        case "beat":
            served = _served(arguments, arguments.most_sessions)
            run_beat(served, _modes(arguments, served), arguments.seconds, arguments.runs)
        case "build-llama-cpp":
            build_llama_cpp()
        case "prefixes":
            run_prefixes(arguments.model, arguments.sessions, arguments.prompt_len)
        case "hand-over":
            run_hand_over(arguments.model)
        case "starts":
            run_starts(arguments.model, arguments.runs)
        case "endless" if arguments.embeds is not None:
            run_endless_embeds(
                arguments.model,
                arguments.turns,
                arguments.embeds,
                arguments.window_tokens,
                arguments.weights,
                num_layers=arguments.layers,
                num_threads=arguments.threads,
                with_server=arguments.server,
            )
        case "endless":
            run_endless(arguments.model, arguments.turns, arguments.window_tokens, arguments.weights)
        case "kv":
            run_kv(arguments.model, arguments.contexts, arguments.context_len)
        case "parked":
            run_parked(arguments.model, arguments.sessions, arguments.context_len, arguments.host_mb, arguments.beating)
        case "weights":
            run_weights(arguments.model, arguments.contexts, arguments.context_len)
        case "float8":
            run_float8(arguments.model, arguments.contexts, arguments.context_len)
        case "families":
            run_families(arguments.families, arguments.steps, arguments.weights)
        case "load-memory":
            run_load_memory(arguments.models)
        case "speculation":
            run_speculation(arguments.model, arguments.runs)
        case "grammars":
            run_grammars(arguments.vocabularies, arguments.answers, arguments.answer_len)
        case "telemetry":
            run_telemetry(arguments.model, arguments.phases)
        case "tool-loop":
            run_tool_loop(arguments.model, arguments.runs)
        case "plan":
            run_plan_check(arguments.model, arguments.cases)
        case "client":
            run_client_cost(arguments.sessions, arguments.seconds, arguments.grpc_sessions, arguments.grpc_seconds)
        case "host":
            run_host_time(arguments.before, arguments.rounds)
        case "edge":
            run_edge_cost(arguments.model, arguments.turns)
        case "overhead":
            run_overhead(arguments.model, arguments.turns)


def _served(arguments: argparse.Namespace, num_sessions: int) -> Served:
    built = built_llama_cpp()
    llama_server, ggufs = arguments.llama_server or built.server, arguments.ggufs or built.ggufs
    return Served(arguments.model, num_sessions, arguments.settings, llama_server, ggufs)


def _modes(arguments: argparse.Namespace, served: Served) -> list[str]:
    if arguments.peers is None:
        return list(arguments.modes)
    peers = arguments.peers or _PEERS
    modes = [*arguments.modes, *(peer for peer in ("openvino", "vllm") if peer in peers)]
    if "llama.cpp" not in peers:
        return modes
    if served.llama_server is None or not served.ggufs:
        raise SystemExit("no llama.cpp server: give --llama-server and --gguf, or build them with `make llama-server`")
    return [*modes, *served.llama_modes]


if __name__ == "__main__":
    main()
