"""The time of an engine step: from the roofline of a machine, or from steps measured on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from microturn.errors import InvalidArgument
from microturn.planning.machine import Machine
from microturn.planning.shape import ModelShape


class StepTimes(Protocol):
    """The time of a step at one context length.

    Attributes:
        jitter: factors by which single steps were longer or shorter, in the measured order.
    """

    @property
    def jitter(self) -> Sequence[float]: ...

    def step_s(self, num_decodes: int, num_appends: int, num_appended: int) -> float:
        """Seconds of a step.

        Args:
            num_decodes: sessions that compute one token.
            num_appends: sessions that compute more.
            num_appended: total tokens of the appending sessions.
        """
        ...


@dataclass(frozen=True)
class Roofline:
    """The lower bound of a step: reading weights, KV and states once, or computing, whichever takes longer.

    Attributes:
        machine: that runs the step.
        shape: of the model.
        weights: their type.
        kv_dtype: type of the KV cache.
        context_len: tokens of each session.
        reached: share of the machine's figures that steps reach.
        fixed_s: added per step.
        row_s: added per session in a step.
        jitter: see `StepTimes`.
    """

    machine: Machine
    shape: ModelShape
    weights: str
    kv_dtype: str
    context_len: int
    reached: float = 1.0
    fixed_s: float = 0.0
    row_s: float = 0.0
    jitter: Sequence[float] = (1.0,)

    def step_s(self, num_decodes: int, num_appends: int, num_appended: int) -> float:
        """See `StepTimes`."""
        num_rows, num_tokens = num_decodes + num_appends, num_decodes + num_appended
        kv_bytes = num_rows * self.shape.visible_bytes(self.kv_dtype, self.context_len)
        bound_s = (self.shape.step_weight_bytes(self.weights, num_tokens) + kv_bytes) / self.machine.bandwidth
        if self.machine.flops is not None:
            bound_s = max(bound_s, num_tokens * self.shape.token_flops(self.context_len) / self.machine.flops)
        return bound_s / self.reached + self.fixed_s + num_rows * self.row_s


@dataclass(frozen=True)
class MeasuredStep:
    """Steps of one kind, as measured by `microturn bench engine`.

    Attributes:
        num_rows: sessions.
        context_len: tokens of each session before the step.
        num_new: tokens that each session computes.
        step_s: median time.
        jitter: single steps relative to the median.
    """

    num_rows: int
    context_len: int
    num_new: int
    step_s: float
    jitter: tuple[float, ...] = (1.0,)


# A line through several contexts goes on up to so many times the longest of them.
_LONGEST_REACH = 2


class Interpolated:
    """Interpolates between measured steps.

    Two lines of seconds over tokens: decode steps and append steps; a mixed step lies between them, by its tokens.
    Beyond the largest measured step they are extrapolated; a step at a shorter context than any takes no less time.

    Args:
        steps: the measured steps.
        context_len: tokens of each session.

    Attributes:
        jitter: see `StepTimes`.

    Raises:
        InvalidArgument: there are no decode steps or no appends among them, or no line can be drawn through either; or
            the context is beyond those that were measured.
    """

    def __init__(self, steps: Sequence[MeasuredStep], context_len: int) -> None:
        decodes = [step for step in steps if step.num_new == 1]
        appends = [step for step in steps if step.num_new > 1]
        if not decodes or not appends:
            raise InvalidArgument("the measured steps must have decode steps (new = 1) and appends (new > 1)")
        self.jitter = tuple(factor for step in steps for factor in step.jitter)
        self._decodes = _line(decodes, context_len)
        self._appends = _line(appends, context_len)

    def step_s(self, num_decodes: int, num_appends: int, num_appended: int) -> float:
        """See `StepTimes`."""
        num_tokens = num_decodes + num_appended
        appended_share = num_appended / num_tokens
        decode_s = _at(self._decodes, num_tokens) if num_decodes else 0.0
        append_s = _at(self._appends, num_tokens) if num_appends else 0.0
        return (1 - appended_share) * decode_s + appended_share * append_s


_Line = list[tuple[float, float]]


def _line(steps: Sequence[MeasuredStep], context_len: int) -> _Line:
    """Seconds over tokens at a context; through at least two numbers of tokens, since one says nothing of others.

    Raises:
        InvalidArgument: too little was measured for it.
    """
    contexts: dict[tuple[int, int], _Line] = {}
    for step in steps:
        contexts.setdefault((step.num_rows, step.num_new), []).append((step.context_len, step.step_s))
    line = _through(
        (num_rows * num_new, _at_context(_through(points), context_len))
        for (num_rows, num_new), points in contexts.items()
    )
    if len(line) == 1:
        kind = "appends" if steps[0].num_new > 1 else "decode steps"
        raise InvalidArgument(
            f"{kind} of one size were measured ({line[0][0]:.0f} tokens), which says nothing of larger ones: measure "
            "them with two numbers of sessions or more (--measure, `microturn bench engine --rows 1 16`)"
        )
    return line


def _at_context(line: _Line, context_len: int) -> float:
    """Seconds at a context, of the line over contexts."""
    longest = line[-1][0]
    if context_len > longest * (_LONGEST_REACH if len(line) > 1 else 1):
        raise InvalidArgument(
            f"steps were measured at contexts of at most {longest:.0f} tokens, which says nothing of {context_len}: "
            f"measure them at that one (--measure, `microturn bench engine --contexts {longest:.0f} {context_len}`)"
        )
    return _at(line, context_len)


def _through(points: Iterable[tuple[float, float]]) -> _Line:
    """The points in order; points with equal tokens are averaged."""
    places: dict[float, list[float]] = {}
    for x, y in points:
        places.setdefault(x, []).append(y)
    return sorted((x, fmean(ys)) for x, ys in places.items())


def _at(line: _Line, x: float) -> float:
    """Linear between points; constant before the first, extrapolated behind the last."""
    if x <= line[0][0] or len(line) == 1:
        return line[0][1]
    upper = next((index for index, point in enumerate(line) if point[0] >= x), len(line) - 1)
    (x0, y0), (x1, y1) = line[upper - 1], line[upper]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)
