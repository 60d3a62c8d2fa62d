"""The command line of the benchmarks."""

from __future__ import annotations

import argparse

from load_tests.bench.endless import run_endless
from load_tests.bench.kv_types import run_kv
from load_tests.bench.overhead import run_overhead
from load_tests.bench.prefixes import run_prefixes
from load_tests.bench.turns import run_turns
from load_tests.bench.weight_types import run_weights


def main() -> None:
    """Runs one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.bench", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a directory or an embedded model (%(default)s)")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    turns = benchmarks.add_parser("turns", help="turn protocol: session, stateless, stateless with prefix reuse")
    turns.add_argument("--sessions", type=int, default=4)
    turns.add_argument("--turns", type=int, default=60)
    turns.add_argument("--runs", type=int, default=3)
    turns.add_argument("--stateless-every", type=int, default=10, help="measure each so many-th stateless turn")
    overhead = benchmarks.add_parser("overhead", help="what server, adapter and client add to the engine")
    overhead.add_argument("--turns", type=int, default=100)
    endless = benchmarks.add_parser("endless", help="one session far beyond its model's positions")
    endless.add_argument("--turns", type=int, default=20_000)
    endless.add_argument("--window-tokens", type=int, default=1000)
    prefixes = benchmarks.add_parser("prefixes", help="many sessions that begin with one long prompt")
    prefixes.add_argument("--sessions", type=int, default=50)
    prefixes.add_argument("--prompt-len", type=int, default=1000)
    kv = benchmarks.add_parser("kv", help="a KV cache in 16 or 8 bits: perplexity of a real text, room and time")
    kv.add_argument("--contexts", type=int, default=6)
    kv.add_argument("--context-len", type=int, default=2048)
    weights = benchmarks.add_parser("weights", help="weights in 8 bits: perplexity of a real text, bytes and time")
    weights.add_argument("--contexts", type=int, default=20)
    weights.add_argument("--context-len", type=int, default=512)
    arguments = parser.parse_args()
    match arguments.benchmark:
        case "turns":
            run_turns(arguments.model, arguments.sessions, arguments.turns, arguments.runs, arguments.stateless_every)
        case "prefixes":
            run_prefixes(arguments.model, arguments.sessions, arguments.prompt_len)
        case "endless":
            run_endless(arguments.model, arguments.turns, arguments.window_tokens)
        case "kv":
            run_kv(arguments.model, arguments.contexts, arguments.context_len)
        case "weights":
            run_weights(arguments.model, arguments.contexts, arguments.context_len)
        case "overhead":
            run_overhead(arguments.model, arguments.turns)


if __name__ == "__main__":
    main()
