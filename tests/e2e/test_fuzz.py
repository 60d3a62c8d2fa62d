"""Thousands of requests that are wrong in every way that gRPC can carry: each is answered, and nobody else notices."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from transformers import PreTrainedModel
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.fuzzer import SESSION_IDS, SESSION_KEYS, Fuzzer
from support.oracle import check_greedy, stock_greedy
from support.pipelined import Pending, PipelinedStream
from support.processes import model_process_ids
from support.raw import RawStream, ids, open_channel, turn_request

SEED = 20260
NUM_REQUESTS, NUM_REQUESTS_FULL = 3_000, 10_000
NUM_STREAMS = 4
NUM_UNDER_WAY = 48
NUM_BYSTANDERS = 3
BEAT_S = 0.4
PROMPT = list(range(4000, 4020))


class Bystander:
    """A session that talks at its beat and takes no notice."""

    def __init__(self, address: str, number: int) -> None:
        self.context: list[int] = []
        self.generated: list[int] = []
        self._address = address
        self._number = number

    def talk(self, is_over: threading.Event) -> None:
        rng = random.Random(self._number)
        with RawStream(self._address) as stream:
            for turn in itertools.count():
                given = rng.choices(range(1000, 40_000), k=rng.randint(1, 6))
                answer = stream.ask(
                    f"bystander-{self._number}",
                    start=turn == 0,
                    end=(has_to_end := is_over.wait(BEAT_S)),
                    input_ids=ids(*given),
                    options={"max_tokens": rng.randint(1, 3), "ignore_eos": True},
                )
                assert answer.error is None, answer.error
                self.context += given
                assert answer.position == len(self.context)
                self.generated += range(len(self.context), len(self.context) + len(answer.token_ids))
                self.context += answer.token_ids
                assert answer.status is not None
                assert answer.status["context_len"] == len(self.context)
                if has_to_end:
                    return


def send_wrong_requests(address: str, seed: int, num_requests: int, model: PreTrainedModel) -> Counter[str]:
    """Sends them on a stream; says how often each code came back."""
    fuzzer = Fuzzer(seed, vocab_size=model.config.vocab_size, hidden_size=model.config.hidden_size)
    codes: Counter[str] = Counter()
    under_way: deque[Pending] = deque()
    with PipelinedStream(address) as stream:
        for number in range(num_requests):
            under_way.append(stream.send(fuzzer.request()))
            if number >= NUM_UNDER_WAY:
                codes[check_answered(under_way.popleft(), seed)] += 1
        for pending in under_way:
            codes[check_answered(pending, seed)] += 1
        stream.finish()
    return codes


def check_answered(pending: Pending, seed: int) -> str:
    """Waits for the answer; returns its code, `TRITON` for a refusal of Triton's own, or `OK`."""
    answer = pending.wait()
    what = f"seed {seed}: {str(pending.request)[:2000]} got {answer}"
    if answer.error is None:
        # Who asks for some outputs only, and whose request id is not its own, may not see its status.
        assert answer.status is not None or pending.request.outputs or len(pending.request.id) != 8, what
        return "OK"
    assert answer.code != "INTERNAL", what
    assert "not healthy" not in answer.error, what
    return answer.code if answer.code is not None and answer.code.isupper() else "TRITON"


def close(stream: RawStream, session_id: int | str) -> None:
    """Closes whatever lives under an id, which may need a key, by a session that replaces it and ends at once."""
    for key in (None, *SESSION_KEYS):
        options: dict[str, object] = {} if key is None else {"session_key": key}
        answer = stream.ask(session_id, start=True, end=True, input_ids=ids(), options=options)
        if answer.code is None:
            assert answer.status is not None
            assert answer.status["finish_reason"] == "closed"
            return
        assert answer.code == "PERMISSION_DENIED", answer.error
    pytest.fail(f"session {session_id!r} cannot be closed")


def test_whatever_comes_is_answered_and_nobody_else_notices(server: str, smollm2: PreTrainedModel, full: bool) -> None:
    num_requests = NUM_REQUESTS_FULL if full else NUM_REQUESTS
    model_processes = model_process_ids()
    bystanders = [Bystander(server, number) for number in range(NUM_BYSTANDERS)]
    is_over = threading.Event()
    with ThreadPoolExecutor(NUM_BYSTANDERS + NUM_STREAMS) as pool:
        talks = [pool.submit(bystander.talk, is_over) for bystander in bystanders]
        seeds = range(SEED, SEED + NUM_STREAMS)
        try:
            share = num_requests // NUM_STREAMS
            codes = sum(pool.map(lambda seed: send_wrong_requests(server, seed, share, smollm2), seeds), Counter())
        finally:
            is_over.set()
        for talk in talks:
            talk.result()
    assert codes.total() == num_requests
    assert num_requests - codes["OK"] >= num_requests // 2
    # They are wrong in many ways, and the right ones among them do something.
    expected = {"TRITON", "INVALID_ARGUMENT", "CONTEXT_FULL", "NOT_FOUND", "PERMISSION_DENIED", "FAILED_PRECONDITION"}
    assert expected | {"DEADLINE_EXCEEDED"} <= set(codes), codes
    assert min(codes["OK"], codes["INVALID_ARGUMENT"]) > num_requests // 20, codes

    with RawStream(server) as stream:
        for session_id in SESSION_IDS:
            close(stream, session_id)
        answer = stream.ask("after", start=True, end=True, input_ids=ids(*PROMPT), options={"max_tokens": 4})
    assert answer.token_ids == stock_greedy(smollm2, PROMPT, 4)
    assert model_process_ids() == model_processes, "the model process was replaced"
    for bystander in bystanders:
        assert len(bystander.generated) > 10
        check_greedy(smollm2, bystander.context, bystander.generated)


@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"\x0a\x05ab"], ids=["garbage", "cut off"])
def test_a_message_that_does_not_parse_ends_its_own_stream_only(server: str, raw: RawStream, content: bytes) -> None:
    """Triton cannot know what it was: it answers what came before, then closes the stream."""
    raw.ask("beside", start=True, input_ids=ids(*PROMPT), options={"max_tokens": 0})
    with open_channel(server) as channel:
        send = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        first = turn_request("unparsable", start=True, end=True, input_ids=ids(), options={"max_tokens": 0})
        (response,) = list(send(iter([first.SerializeToString(), content]), timeout=20))
        assert response.infer_response.id == first.id
        assert response.error_message == ""
    assert raw.ask("beside", end=True, input_ids=ids()).status["context_len"] == len(PROMPT)


def test_a_call_that_can_bring_no_stream_is_refused(server: str) -> None:
    request = turn_request("unary", start=True, end=True, input_ids=ids(5))
    with open_channel(server) as channel:
        triton = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            triton.ModelInfer(request, timeout=20)
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("model", "version", "refusal"),
    [
        ("nobody", "", "Request for unknown model"),
        ("", "", "Request for unknown model"),
        ("../streaming_llm", "", "Request for unknown model"),
        ("streaming_llm", "2", "Request for unknown model"),
        ("streaming_llm", "-1", "version should be an integral value > 0"),
        ("streaming_llm", "9" * 30, "version should be an integral value > 0"),
    ],
)
def test_a_model_that_is_not_there_is_refused(server: str, model: str, version: str, refusal: str) -> None:
    request = turn_request("elsewhere", start=True, end=True, input_ids=ids(5))
    request.model_name, request.model_version = model, version
    with PipelinedStream(server) as stream:
        assert refusal in (stream.send(request).wait().error or "")
        stream.finish()
