"""The plan: how many sessions fit in memory, how many are on time, and which limit applies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from microturn.kv.page_needs import PageNeeds
from microturn.planning.beat import Beat, on_time_share, sessions_on_time
from microturn.planning.machine import Machine
from microturn.planning.shape import ModelShape
from microturn.planning.sizes import size
from microturn.planning.step_times import MeasuredStep, Roofline, StepTimes
from microturn.settings import Settings


@dataclass(frozen=True)
class Question:
    """The input of a plan.

    Attributes:
        shape: of the model.
        machine: that serves the model.
        weights: their type.
        kv_dtype: type of the KV cache.
        context_len: tokens of each session: the longest context to serve on time.
        beat: the workload.
        memory_share: share of the machine's memory for weights and KV.
        page_size: tokens in a page.
        window_slack: see `ModelShape.needs`.
    """

    shape: ModelShape
    machine: Machine
    weights: str
    kv_dtype: str
    context_len: int
    beat: Beat
    memory_share: float
    page_size: int = Settings.page_size
    window_slack: int = Settings.window_slack

    @property
    def weight_bytes(self) -> int:
        return self.shape.weight_bytes(self.weights)

    @cached_property
    def needs(self) -> PageNeeds:
        return self.shape.needs(self.kv_dtype, page_size=self.page_size, window_slack=self.window_slack)

    @property
    def session_bytes(self) -> int:
        return self.needs.session_bytes(self.context_len)

    @property
    def least_pool_bytes(self) -> int:
        """Bytes of the smallest pool: a server wants room for one context in all layers, whatever their windows."""
        return self.context_len * self.needs.token_bytes

    @property
    def sessions_by_memory(self) -> int:
        """Sessions whose pages fit beside the weights; parked sessions may be offloaded and do not count then."""
        free_bytes = self.machine.memory_bytes * self.memory_share - self.weight_bytes
        return int(free_bytes // self.session_bytes) if free_bytes >= self.least_pool_bytes else 0


@dataclass(frozen=True)
class Plan:
    """The result of a plan.

    Attributes:
        question: the input.
        times: of the steps.
        source: origin of the step times, for people.
        sessions_by_time: number of sessions with enough turns on time.
        steps: the measured steps.
    """

    question: Question
    times: StepTimes
    source: str
    sessions_by_time: int
    steps: Sequence[MeasuredStep] = ()

    @classmethod
    def of(cls, question: Question, times: StepTimes, source: str, steps: Sequence[MeasuredStep] = ()) -> Plan:
        return cls(question, times, source, sessions_on_time(question.beat, times), steps)

    @property
    def sessions(self) -> int:
        return min(self.sessions_by_time, self.question.sessions_by_memory)

    @property
    def limit(self) -> str:
        """`memory` or `time`."""
        return "memory" if self.question.sessions_by_memory <= self.sessions_by_time else "time"

    def decode_ms(self, num_sessions: int) -> float:
        """Milliseconds of a step in which `num_sessions` sessions compute a token each."""
        return self.times.step_s(num_sessions, 0, 0) * 1e3

    @property
    def roofline(self) -> Roofline:
        """The step times that the machine's figures allow."""
        asked = self.question
        return Roofline(asked.machine, asked.shape, asked.weights, asked.kv_dtype, asked.context_len)

    def on_time_share(self, num_sessions: int) -> float:
        """The share of turns on time with `num_sessions` sessions."""
        return on_time_share(self.question.beat, self.times, num_sessions)

    def lines(self) -> Iterator[str]:
        """The plan for people."""
        asked, shape, beat = self.question, self.question.shape, self.question.beat
        memory_gb, share = asked.machine.memory_bytes / 1e9, asked.memory_share
        at = max(1, self.sessions)
        least_pool = asked.least_pool_bytes
        pool = f", in a pool of at least {size(least_pool)}" if least_pool > asked.session_bytes else ""
        states = f", with recurrent states of {size(shape.state_bytes)} each" if shape.state_bytes else ""
        rows = [
            ("model", f"{shape.name}, {shape.num_params:,} parameters, {shape.num_layers} layers"),
            (
                "weights",
                f"{asked.weights}: {size(asked.weight_bytes)} in memory, of which a step of 1 session reads "
                f"{size(shape.step_weight_bytes(asked.weights, 1))}",
            ),
            (
                "KV",
                f"{asked.kv_dtype}: {shape.token_bytes(asked.kv_dtype):,} B per token, "
                f"{size(asked.session_bytes)} per session of {asked.context_len:,} tokens{states}",
            ),
            (
                "machine",
                f"{asked.machine.name}: {memory_gb:.1f} GB at {asked.machine.bandwidth / 1e9:,.1f} GB/s",
            ),
            (
                "roofline",
                f"a decode step of 1 session {self.roofline.step_s(1, 0, 0) * 1e3:.2f} ms, "
                f"of {at:,} {self.roofline.step_s(at, 0, 0) * 1e3:.2f} ms",
            ),
            (
                "step",
                f"of 1 {self.decode_ms(1):.2f} ms, of {at:,} {self.decode_ms(at):.2f} ms ({self.source})",
            ),
            (
                "around",
                f"a turn {beat.cost.turn_s * 1e3:.1f} ms; it holds up steps by {beat.cost.turn_hold_s * 1e3:.1f} ms, "
                f"a token before its last by {beat.cost.response_hold_s * 1e3:.1f} ms",
            ),
            (
                "by memory",
                f"{asked.sessions_by_memory:,} sessions: ({share:.0%} of {memory_gb:.1f} GB - "
                f"{size(asked.weight_bytes)}) / {size(asked.session_bytes)}{pool}",
            ),
            (
                "by time",
                f"{self.sessions_by_time:,} sessions: {beat.wanted_share:.0%} of turns, {beat.num_input} tokens in and "
                f"{beat.num_output} out, within {beat.beat_s * 1e3:g} ms, by simulation",
            ),
            ("so", f"{self.sessions:,} sessions; what limits is {self.limit}"),
        ]
        if self.sessions:
            settings = f"--set kv_tokens={self.kv_tokens} --set max_sessions={self.sessions}"
            max_context = f" --set max_context={self.max_context}" if self.max_context else ""
            rows.append(("serve with", settings + max_context))
        for name, text in rows:
            yield f"{name:<11}{text}"

    @property
    def kv_tokens(self) -> int:
        """The setting `kv_tokens` with room for these sessions."""
        asked = self.question
        of_sessions = -(-self.sessions * asked.session_bytes // asked.needs.token_bytes)
        return max(of_sessions, asked.context_len) if self.sessions else 0

    @property
    def max_context(self) -> int:
        """The setting `max_context`; 0, what the model was trained for, where the pool holds that: it has to."""
        asked = self.question
        return 0 if 0 < asked.shape.max_context <= self.kv_tokens else asked.context_len

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        asked, shape, beat = self.question, self.question.shape, self.question.beat
        sizes = (1, max(1, self.sessions))
        return {
            "model": shape.name,
            "num_params": shape.num_params,
            "weights": asked.weights,
            "weight_bytes": asked.weight_bytes,
            "step_weight_bytes": shape.step_weight_bytes(asked.weights, 1),
            "kv_dtype": asked.kv_dtype,
            "kv_bytes_per_token": shape.token_bytes(asked.kv_dtype),
            "state_bytes": shape.state_bytes,
            "context_len": asked.context_len,
            "session_bytes": asked.session_bytes,
            "machine": {
                "name": asked.machine.name,
                "memory_bytes": asked.machine.memory_bytes,
                "bandwidth_bytes_per_s": asked.machine.bandwidth,
                "flops": asked.machine.flops,
            },
            "beat_ms": beat.beat_s * 1e3,
            "num_input": beat.num_input,
            "num_output": beat.num_output,
            "wanted_share": beat.wanted_share,
            "roofline_decode_ms": {str(num): self.roofline.step_s(num, 0, 0) * 1e3 for num in sizes},
            "decode_ms": {str(num): self.decode_ms(num) for num in sizes},
            "step_times": self.source,
            "serving_cost_ms": {
                "turn": beat.cost.turn_s * 1e3,
                "turn_hold": beat.cost.turn_hold_s * 1e3,
                "response_hold": beat.cost.response_hold_s * 1e3,
            },
            "sessions_by_memory": asked.sessions_by_memory,
            "sessions_by_time": self.sessions_by_time,
            "sessions": self.sessions,
            "limit": self.limit,
            "kv_tokens": self.kv_tokens,
            "max_context": self.max_context,
            # Unrounded: a line through two short steps goes on to many sessions.
            "steps": [
                {
                    "num_rows": step.num_rows,
                    "context_len": step.context_len,
                    "num_new": step.num_new,
                    "step_ms": step.step_s * 1e3,
                    "jitter": list(step.jitter),
                }
                for step in self.steps
            ],
        }
