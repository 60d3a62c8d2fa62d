"""`make demo`: a user talks to the real server in chunks of 200 ms and sees the answer as it comes.

Starts `microturn serve` on loopback, holds one streaming session, and afterwards sends the same turns without a
session, each with the whole conversation, to draw what the session saves. The server's log goes to a file.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from load_tests.bench.pictures import draw_latencies
from microturn.errors import MicroturnError
from microturn.serve.child import running_server
from microturn.zoo.store import resolve_model
from microturn_client import Client, MessageRole, Session, Tokens, TurnEnd
from microturn_client import MicroturnError as ClientError

BEAT_S = 0.2
WORDS_PER_BEAT = 3
PICTURE = Path("out/demo.png")
SERVER_LOG = Path("out/demo.log")
SPOKEN = [
    "Hello! I have a small balcony that gets sun only in the morning, and I would like to grow something there that I "
    "can eat. What would you plant if you were a beginner like me?",
    "That sounds good. And how often do I have to water all of that when the summer gets really hot and I am away for "
    "the weekend?",
    "One last thing. My cat likes to chew on leaves. Is any of these plants a danger to her?",
]


@dataclass(frozen=True)
class Sent:
    """A turn as it went over the wire, in ids, so that it can be sent again without a session."""

    appended_ids: list[int]
    generated_ids: list[int]
    latency_ms: float


def main() -> int:
    """Runs the demo; returns the exit code."""
    try:
        model = resolve_model("smollm2-135m")
    except MicroturnError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    PICTURE.parent.mkdir(exist_ok=True)
    try:
        _compare(str(model))
    except (RuntimeError, ClientError) as error:
        print(f"\ndemo: {error}; the server's log: {SERVER_LOG}", file=sys.stderr)
        return 1
    print(f"the server's log: {SERVER_LOG}")
    return 0


def _compare(model: str) -> None:
    """Takes the turns in a session, then without one, and draws their latencies.

    Raises:
        RuntimeError: the server did not start.
        ClientError: a turn failed.
    """
    print("starting Triton with SmolLM2-135M-Instruct (about 10 s, longer the first time) …")
    with running_server(model, log_path=SERVER_LOG) as address, Client(address) as client:
        with client.session(return_appended_ids=True, repetition_penalty=1.1) as session:
            turns = [turn for text in SPOKEN for turn in _exchange(session, text)]
        print("\nthe same turns without a session, each with the whole conversation …")
        stateless_ms = _without_session(client, turns)
    session_ms = [turn.latency_ms for turn in turns]
    lines = {"session": session_ms, "stateless": stateless_ms}
    draw_latencies(
        PICTURE,
        {mode: dict(enumerate(latencies, 1)) for mode, latencies in lines.items()},
        title="A talk in chunks of 200 ms: the peaks are the answers",
    )
    late, late_stateless = (median(latencies[-10:]) for latencies in (session_ms, stateless_ms))
    print(f"\nthe last ten turns, median: {late:.0f} ms in the session, {late_stateless:.0f} ms without one")
    print(f"latency against turn: {PICTURE}")


def _exchange(session: Session, text: str) -> Iterator[Sent]:
    """One thing that is said, chunk by chunk on the beat, and its answer."""
    words = text.split(" ")
    print()
    for first in range(0, len(words), WORDS_PER_BEAT):
        beat_s = time.perf_counter()
        chunk = " ".join(words[first : first + WORDS_PER_BEAT])
        turn = _turn(session, chunk if first == 0 else f" {chunk}", role="user", max_tokens=0)
        print(f"  {turn.latency_ms:5.0f} ms  +{len(turn.appended_ids):2} tokens  {chunk}")
        yield turn
        time.sleep(max(0.0, BEAT_S - (time.perf_counter() - beat_s)))
    yield _turn(session, None, role="assistant", max_tokens=40)


def _turn(session: Session, text: str | None, *, role: MessageRole, max_tokens: int) -> Sent:
    """Sends a turn and prints what is generated as it comes."""
    started_s = time.perf_counter()
    generated: list[int] = []
    for event in session.turn(text, role=role, max_tokens=max_tokens):
        elapsed_ms = (time.perf_counter() - started_s) * 1e3
        match event:
            case Tokens():
                if not generated:
                    print(f"\n  first token after {elapsed_ms:.0f} ms:\n  ", end="")
                generated += event.ids
                print(event.text.replace("\n", "\n  "), end="", flush=True)
            case TurnEnd(status):
                if generated:
                    print(f"\n  [{len(generated)} tokens in {elapsed_ms:.0f} ms, {status.context_len} in the context]")
                return Sent(list(status.appended_ids or ()), generated, elapsed_ms)
    raise AssertionError("a turn ends with TurnEnd")


def _without_session(client: Client, turns: list[Sent]) -> list[float]:
    """Wall time in ms of each turn as a request of its own: all that came before, computed again."""
    latencies_ms = []
    history: list[int] = []
    for turn in turns:
        history += turn.appended_ids
        if history:
            # With a salt of its own it finds nothing that another request has left.
            with client.session(cache_salt=secrets.token_hex(8)) as request:
                started_s = time.perf_counter()
                num_tokens = len(turn.generated_ids)
                request.turn(history, max_tokens=num_tokens, ignore_eos=True).wait()
                latencies_ms.append((time.perf_counter() - started_s) * 1e3)
        else:
            latencies_ms.append(turn.latency_ms)  # all of it was held back, as the beginning of a word
        history += turn.generated_ids
    return latencies_ms


if __name__ == "__main__":
    sys.exit(main())
