"""Makes requests that are wrong in one to three ways, and some that are right; the same ones for the same seed.

Knows the names of the contract and what Triton's protocol can carry; knows nothing of what must come back.

Three things are left out, since they end a process of Triton before any code of ours sees them:

* a shape whose size in bytes overflows 64 bits, such as [1, 2^62] without content: the model process (until 26.03);
* an output of type BYTES asked for with the parameter `classification`: the server, by a division (until 25.06);
* a model or a version that is not there, asked for on a stream that is just being written to: the server, by a second
  write (still so in 2026). On a stream of its own it is harmless.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from microturn.sessions.options import SessionOptions, TurnOptions
from support.raw import add_input, ids, set_parameter, turn_request

Request = service_pb2.ModelInferRequest

OPTION_NAMES = sorted(option.name for option in (*fields(TurnOptions), *fields(SessionOptions)))
SESSION_IDS: list[int | str] = [
    *range(1, 9),
    2**63 - 1,
    *(f"fuzz-{number}" for number in range(8)),
    "é☃\u202e",
    "a/b%2F?c=d;\n",
    "n\0ul",
    "x" * 128,
]
WRONG_IDS: list[int | str] = [0, "", "x" * 129, "é" * 100]
SESSION_KEYS = ["key-a", "key-b", "schlüssel\uffff"]
# None of them asks for more than a few tokens.
VALUES: list[bool | int | float | str] = [
    *(True, False, 0, 1, 2, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)),
    *(0.0, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", " ", "0", "1", "2", "-1", "0.5", "1e400", "nan", "inf", "9" * 5000, "0x2", "true", "TRUE", "null", "None"),
    *("[]", "[1]", "[-1]", '["a"]', '[""]', "[[1]]", "[1e400]", "{}", '[{"name": "f"}]', '["\\ud800"]', "[" * 9000),
    *("queue", "interrupt", "user", "tool", "boss", "\U0010ffff\u202e", "%s%n{}", "'; --", "x" * 300, "x" * 100_000),
]


class Fuzzer:
    """A source of requests.

    Args:
        seed: of all that it draws.
        vocab_size: of the model.
        hidden_size: of the model.
    """

    def __init__(self, seed: int, *, vocab_size: int, hidden_size: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size

    def request(self) -> Request:
        """The next request."""
        rng = self._rng
        start = rng.random() < 0.4
        options: dict[str, Any] = {"max_tokens": rng.choice([0, 0, 1, 2])}
        if start:
            options |= {"max_context": rng.choice([8, 64, 200, 600]), "idle_timeout_s": 60}
            if rng.random() < 0.2:
                options |= {"overflow": "window", "window_tokens": 16}
        request = turn_request(
            rng.choice(SESSION_IDS),
            start=start,
            end=rng.random() < 0.08,
            options=options,
            input_ids=ids(*rng.choices(range(self._vocab_size), k=rng.randint(0, 5))),
        )
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            rng.choice(_MUTATIONS)(self, request)
        return request

    # ---- who and when --------------------------------------------------------------------------------------------

    def _wrong_sequence(self, request: Request) -> None:
        set_parameter(request, "sequence_id", self._rng.choice(WRONG_IDS))

    def _sequence_of_a_wrong_type(self, request: Request) -> None:
        flags = [("sequence_start", "true"), ("sequence_start", 1), ("sequence_end", 0.5), ("sequence_end", -1)]
        others = [("sequence_id", 1.5), ("sequence_id", True), ("priority", "x"), ("timeout", "x"), ("timeout", -5)]
        set_parameter(request, *self._rng.choice(flags + others))

    def _no_sequence(self, request: Request) -> None:
        name = self._rng.choice(["sequence_id", "sequence_start", "sequence_end"])
        if name in request.parameters:
            del request.parameters[name]

    def _other_request_id(self, request: Request) -> None:
        # None with a NUL: Triton answers under what stands before it.
        request.id = self._rng.choice(["", "same", "ünï\n☃", "i" * 5000])

    # ---- options -------------------------------------------------------------------------------------------------

    def _any_option(self, request: Request) -> None:
        name = self._rng.choice(OPTION_NAMES)
        # A key that nobody knows would keep its session from being closed in the end.
        set_parameter(request, name, self._rng.choice(SESSION_KEYS if name == "session_key" else VALUES))

    def _wrong_key(self, request: Request) -> None:
        set_parameter(request, "session_key", self._rng.choice(["", 5, 1.5, True, "k" * 257]))

    def _unknown_option(self, request: Request) -> None:
        names = ["", "max_token", "fork_of", "headers", "triton_x", "x-microturn-tenant", 'ünï"\\\n\0☃', "n" * 100_000]
        set_parameter(request, self._rng.choice(names), self._rng.choice(VALUES))

    def _option_without_value(self, request: Request) -> None:
        request.parameters[self._rng.choice(OPTION_NAMES)].SetInParent()

    def _unsigned_option(self, request: Request) -> None:
        request.parameters[self._rng.choice(OPTION_NAMES)].uint64_param = self._rng.choice([1, 2**64 - 1])

    def _many_options(self, request: Request) -> None:
        for number in range(500):
            set_parameter(request, f"option_{number}", number)

    def _session_play(self, request: Request) -> None:
        """Options that are right in themselves, of all that sessions do besides appending."""
        play: dict[str, list[Any]] = {
            "on_overlap": ["queue", "interrupt"],
            "rewind_to": [0, 1, 5, 2**53],
            "turn": [0, 1, 2, 3, 2**53],
            "session_key": SESSION_KEYS,
            "deadline_ms": [0.001, 1, 50.0],
            "session_priority": [-100, 100],
            "resume": [True],
            "priority": [1, 2**62],
        }
        for name in self._rng.sample(sorted(play), self._rng.randint(1, 3)):
            set_parameter(request, name, self._rng.choice(play[name]))

    # ---- input ---------------------------------------------------------------------------------------------------

    def _input_of_a_wrong_type(self, request: Request) -> None:
        for given in request.inputs:
            given.datatype = self._rng.choice(["INT64", "FP32", "BYTES", "BF16", "BOOL", "", "nonsense"])

    def _wrong_shape(self, request: Request) -> None:
        shapes = [[], [1], [0], [-1], [1, -1], [1, 1, 1], [2, 1], [65, 1], [1, 2**31], [1, 2**40], [0, 5], [1] * 100]
        for given in request.inputs:
            del given.shape[:]
            given.shape.extend(self._rng.choice(shapes))

    def _wrong_content(self, request: Request) -> None:
        if request.raw_input_contents:
            content = request.raw_input_contents[0]
            request.raw_input_contents[0] = self._rng.choice(
                [b"", content[:-1], content + b"\0", content * 2 + b"\xff\xff\xff\xff", b"\xff" * 100_000]
            )

    def _missing_or_further_content(self, request: Request) -> None:
        if self._rng.random() < 0.5:
            del request.raw_input_contents[:]
        else:
            request.raw_input_contents.append(b"abcd")

    def _typed_content(self, request: Request) -> None:
        for given in request.inputs:
            kinds = [given.contents.int_contents, given.contents.int64_contents, given.contents.bool_contents]
            self._rng.choice(kinds).extend([1] * self._rng.randint(1, 3))
        if self._rng.random() < 0.7:
            del request.raw_input_contents[:]

    def _no_input(self, request: Request) -> None:
        del request.inputs[:]
        del request.raw_input_contents[:]

    def _further_input(self, request: Request) -> None:
        name = self._rng.choice(["input_ids", "text_input", "input_embeds", "START", "", "input_idz"])
        add_input(request, name, self._rng.choice([b"more", ids(5), np.zeros((1, 1, self._hidden_size), np.float32)]))

    def _strange_ids(self, request: Request) -> None:
        self._give(request, "input_ids", ids(*self._rng.choice([[-1], [self._vocab_size], [2**31 - 1], [5] * 10_000])))

    def _text(self, request: Request) -> None:
        texts = [b"hello", b"", b"caf\xe9", b"\xff\xfe", b"\xed\xa0\x80", b"\xf0\x9f\x99", b"nul\0", b"<|im_end|>"]
        self._give(request, "text_input", self._rng.choice([*texts, b" " * 5000, b"x" * 200_000, "e\u0301🙂".encode()]))

    def _broken_text(self, request: Request) -> None:
        self._give(request, "text_input", b"abc")
        del request.raw_input_contents[:]
        lengths_that_lie = [b"\xff\xff\xff\xff", b"\x10\0\0\0abc", b"\x01\0\0\0abc", b"\x01", b""]
        request.raw_input_contents.append(self._rng.choice(lengths_that_lie))

    def _texts(self, request: Request) -> None:
        self._give(request, "text_input", b"")
        num_texts = self._rng.choice([0, 2, 50])
        request.inputs[0].shape[1] = num_texts
        request.raw_input_contents[0] = b"\x01\0\0\0a" * num_texts

    def _embeds(self, request: Request) -> None:
        width = self._rng.choice([self._hidden_size] * 3 + [0, 1, self._hidden_size + 1, 20_000])
        value = self._rng.choice([0.0, 1.0, -0.0, 1e-45, 3e38, float("nan"), float("inf")])
        self._give(request, "input_embeds", np.full((1, self._rng.choice([0, 1, 3]), width), value, np.float32))

    def _give(self, request: Request, name: str, value: Any) -> None:
        self._no_input(request)
        add_input(request, name, value)

    # ---- outputs -------------------------------------------------------------------------------------------------

    def _outputs(self, request: Request) -> None:
        names = ["output_ids", "text_output", "status", "nothing", ""]
        for name in self._rng.choices(names, k=self._rng.randint(1, 3)):
            request.outputs.add(name=name)

    def _shared_memory(self, request: Request) -> None:
        request.outputs.add(name="status")
        for tensor in self._rng.choice([request.inputs, request.outputs]):
            tensor.parameters["shared_memory_region"].string_param = "nowhere"
            tensor.parameters["shared_memory_byte_size"].int64_param = self._rng.choice([0, 4, 2**62, -1])


_MUTATIONS: list[Callable[[Fuzzer, Request], None]] = [
    Fuzzer._wrong_sequence,
    Fuzzer._sequence_of_a_wrong_type,
    Fuzzer._no_sequence,
    Fuzzer._other_request_id,
    *[Fuzzer._any_option] * 6,
    Fuzzer._wrong_key,
    Fuzzer._unknown_option,
    Fuzzer._option_without_value,
    Fuzzer._unsigned_option,
    Fuzzer._many_options,
    *[Fuzzer._session_play] * 5,
    Fuzzer._input_of_a_wrong_type,
    Fuzzer._wrong_shape,
    Fuzzer._wrong_content,
    Fuzzer._missing_or_further_content,
    Fuzzer._typed_content,
    Fuzzer._no_input,
    Fuzzer._further_input,
    Fuzzer._strange_ids,
    *[Fuzzer._text] * 2,
    Fuzzer._broken_text,
    Fuzzer._texts,
    *[Fuzzer._embeds] * 2,
    Fuzzer._outputs,
    Fuzzer._shared_memory,
]
