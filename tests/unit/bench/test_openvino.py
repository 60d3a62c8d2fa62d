"""The pipe to OpenVINO's process, with another program at its end."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from load_tests.bench.openvino_peer import OpenVino

# Answers two requests at a time, the later one first, with the lengths of their prompts.
_BACKWARDS = """
import json, sys
while len(two := [json.loads(sys.stdin.readline()) for _ in range(2)]) == 2:
    for request in reversed(two):
        token_ids = [len(request["prompt"])] * request["num_output"]
        print(json.dumps({"id": request["id"], "token_ids": token_ids}), flush=True)
"""


def _program(source: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", source]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_each_conversation_gets_its_answers_and_sends_its_history() -> None:
    with _program(_BACKWARDS) as process:
        peer = OpenVino(process)
        talks = [peer.open(), peer.open()]
        for _ in range(2):
            await asyncio.gather(talks[0].turn([7] * 3, 2), talks[1].turn([7] * 5, 2))
        process.terminate()
        peer.close()
    # What was answered to the second turns is the length of the whole conversation.
    assert [talk._history[-1] for talk in talks] == [3 + 2 + 3, 5 + 2 + 5]


async def test_a_process_that_ends_fails_what_it_owes() -> None:
    with _program("import sys; sys.stdin.readline()") as process:
        peer = OpenVino(process)
        with pytest.raises(RuntimeError, match="has ended"):
            await peer.open().turn([1, 2], 2)
        peer.close()
