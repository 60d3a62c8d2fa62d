"""The runners of a model that several GPUs share: all ranks capture the same passes, and replay the same."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

from microturn.model.gpu.graphs import StepSize
from microturn.model.gpu.runner import GpuRunner
from microturn.model.parallel.commands import Capture, Pass
from microturn.model.parallel.runners import FollowingRunner, LeadingRunner


class LeadingGpuRunner(LeadingRunner, GpuRunner):
    """A `LeadingRunner` on a GPU."""

    def capture(self, sizes: Iterable[StepSize], max_context: int) -> None:
        """See `GpuRunner.capture`."""
        capture = Capture(tuple(sizes), max_context)
        with self.followers.doing(capture):
            super().capture(capture.sizes, capture.max_context)

    @property
    def _may_replay(self) -> bool:
        return self.has_graphs


class FollowingGpuRunner(FollowingRunner, GpuRunner):
    """A `FollowingRunner` on a GPU."""

    def follow(self, told: Pass) -> None:
        """Runs a pass, replayed only where rank 0 replays."""
        with nullcontext() if told.may_replay else self.without_graphs():
            super().follow(told)
