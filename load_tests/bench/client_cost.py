"""What the client library costs: many sessions on the beat in one asyncio process.

A turn brings four token ids and gets four tokens back, each in a response of its own, from a server that counts and
computes nothing (`counting_server`). The cost of a turn is what the client's process used of the processor in a second,
all its threads together, divided by the turns that ended in that second: a sample for each second. So it has all that a
program pays for: the library, asyncio, protobuf, the beat itself and garbage collection.

* `library`: the server is a transport in the same process; the time that it takes for itself is measured and taken off.
* `with gRPC`: the server is another process behind loopback, so gRPC's own share is in it.

Memory is the resident set of the first process. Transcripts grow by what they are there for, the ids of each session,
from which it could be opened anew; what they hold is told apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from load_tests.bench.beat_level import BEAT_S
from load_tests.bench.bystanders import warning
from load_tests.bench.client_beat import NUM_INPUT, NUM_OUTPUT, Costs
from load_tests.bench.pictures import draw_client_cost
from load_tests.bench.results import percentile, print_table, write_result


def run_client_cost(num_sessions: int, seconds: int, grpc_sessions: int, grpc_seconds: int) -> None:
    """Measures, prints tables, writes a JSON file and draws a picture.

    Args:
        num_sessions: at once.
        seconds: of the library's measurement.
        grpc_sessions: at once with gRPC; their server wants as much of the processor as they do.
        grpc_seconds: of that.
    """
    library = _measured(num_sessions, seconds)
    with_grpc = _measured(grpc_sessions, grpc_seconds, "grpc")
    print(f"\na turn every {BEAT_S * 1e3:.0f} ms per session, {NUM_INPUT} tokens in, {NUM_OUTPUT} out; ms")
    print_table(
        ["", "sessions", "processor per turn, p50", "p99", "from due to end, p50", "p99", "on time", ""],
        [_row("library", library), _row("with gRPC", with_grpc)],
    )
    seconds_told = range(0, seconds + 1, 30)
    memory = [["memory", *_at(library.memory_mb, seconds_told)]]
    memory.append(["transcripts among it", *_at(library.transcripts_mb, seconds_told)])
    print_table(["MB after minutes", *(f"{second / 60:g}" for second in seconds_told)], memory)
    result = {"protocol": __doc__, "library": _as_json(library), "with_grpc": _as_json(with_grpc)}
    print("written:", write_result("client-cost", result))
    print("drawn:  ", draw_client_cost("client-cost", library.turn_ms, library.memory_mb, library.transcripts_mb))


def _measured(num_sessions: int, seconds: int, *transport: str) -> Costs:
    print(f"{num_sessions} sessions, {seconds} s …", flush=True)
    command = [sys.executable, "-m", "load_tests.bench.client_beat", str(num_sessions), str(seconds), *transport]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Costs(**json.loads(done.stdout))


def _on_time_share(costs: Costs) -> float:
    """Turns that ended within a beat of when they were due, among all."""
    return sum(ms <= BEAT_S * 1e3 for ms in costs.latencies_ms) / len(costs.latencies_ms)


def _row(name: str, costs: Costs) -> list[object]:
    cost = [f"{percentile(costs.turn_ms, percent):.2f}" for percent in (50, 99)]
    latency = [percentile(costs.latencies_ms, percent) for percent in (50, 99)]
    return [name, costs.num_sessions, *cost, *latency, f"{_on_time_share(costs):.1%}", warning(costs.others_share)]


def _at(values: Sequence[float], seconds: Sequence[int]) -> list[str]:
    return [f"{values[second]:.1f}" for second in seconds]


def _as_json(costs: Costs) -> dict[str, object]:
    return {
        "num_sessions": costs.num_sessions,
        "num_turns": len(costs.latencies_ms),
        "on_time_share": round(_on_time_share(costs), 5),
        "others_share_of_processor": round(costs.others_share, 3),
        "turn_ms": {f"p{percent}": round(percentile(costs.turn_ms, percent), 3) for percent in (50, 90, 99)},
        "latency_ms": {f"p{percent}": round(percentile(costs.latencies_ms, percent), 2) for percent in (50, 90, 99)},
        "memory_mb": [round(mb, 1) for mb in costs.memory_mb],
        "transcripts_mb": [round(mb, 2) for mb in costs.transcripts_mb],
        "turn_ms_by_second": [round(ms, 3) for ms in costs.turn_ms],
    }
