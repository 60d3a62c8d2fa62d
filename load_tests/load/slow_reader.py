"""Somebody who asks for long answers and reads them slowly. What waits for them must not hold up anybody else.

The client library reads a stream as fast as it can, so this one speaks gRPC itself: it takes a response from the stream
only when it wants the next one, and its window is small, so that the others stay in the server's memory, not in ours.
"""

from __future__ import annotations

import random
from typing import ClassVar

import gevent
import grpc
import numpy as np
from locust import User, task
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from load_tests.load.recorder import Recorder
from load_tests.load.target import target_of
from load_tests.load.words import words

_SMALL_WINDOW = {"grpc.http2.bdp_probe": 0, "grpc.http2.lookahead_bytes": 1024}
_NUM_TOKENS = 100
_READ_EVERY_S = 0.1


class SlowReader(User):
    """Asks for a hundred tokens, again and again, each time in a session of its own; reads ten responses a second."""

    recorder: ClassVar[Recorder]

    def on_start(self) -> None:
        """Comes."""
        self.scenario = type(self).__name__
        self.chance = random.Random(f"{self.scenario}.{self.recorder.next_index()}")
        assert self.host is not None
        assert self.environment.parsed_options is not None
        self.channel = target_of(self.host, self.environment.parsed_options).channel(_SMALL_WINDOW)
        self.recorder.num_users += 1

    def on_stop(self) -> None:
        """Leaves."""
        self.recorder.num_users -= 1
        self.channel.close()

    @task
    def read(self) -> None:
        """One session, one long answer."""
        request = service_pb2.ModelInferRequest(model_name="streaming_llm")
        request.parameters["sequence_id"].int64_param = self.chance.getrandbits(62) + 1
        request.parameters["sequence_start"].bool_param = True
        request.parameters["sequence_end"].bool_param = True
        request.parameters["max_tokens"].int64_param = _NUM_TOKENS
        request.parameters["ignore_eos"].bool_param = True
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
        text = np.array([words(self.chance, 8).encode()], dtype=object)
        request.raw_input_contents.append(serialize_byte_tensor(text).item())
        self.recorder.num_sessions += 1
        try:
            for response in service_pb2_grpc.GRPCInferenceServiceStub(self.channel).ModelStreamInfer(iter([request])):
                if response.error_message:
                    self._fail(response.error_message.split(":")[0], RuntimeError(response.error_message))
                    return
                self.recorder.counted("slow_responses", self.scenario)
                gevent.sleep(_READ_EVERY_S)
            self.recorder.counted("slow_answers", self.scenario)
        except grpc.RpcError as error:
            self._fail(error.code().name, error)
        finally:
            self.recorder.num_sessions -= 1

    def _fail(self, code: str, error: Exception) -> None:
        self.recorder.failed("read", self.scenario, code, error)
        gevent.sleep(1.0)
