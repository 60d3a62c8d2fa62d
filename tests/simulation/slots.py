"""The product's keeper of Triton's slots, by events in the place of its threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from microturn.hosts.triton.sequence_slots import Control, SequenceSlots
from microturn.hosts.triton.slot_keeper import SlotKeeper
from microturn.sessions.turn import SessionId
from microturn_client._inputs import encode_input
from microturn_client._wire import build_request
from simulation import pb_utils, triton
from simulation.world import World

# A control request takes so long to get out of the model.
_SEND_S = 2e-4
_START_TIMEOUT_S = 1.0
_OVERDUE_POLL_S = 0.25


class SteppedSlotKeeper(SlotKeeper):
    """Counts slots and sends control requests as the real one does.

    Args:
        world: the clock.
        num_slots: Triton's.
        send: hands Triton a control request, and how long it may wait.
    """

    def __init__(self, world: World, num_slots: int, send: Callable[[triton.Control, float], None]) -> None:
        self._triton: Any = pb_utils
        self._world = world
        self._send_control = send
        self._is_over = False
        self._names = {control: f"microturn-{control.name}" for control in Control}
        self.slots = SequenceSlots(num_slots, self._order, lambda: world.now_s)
        self._release()

    def stop(self) -> None:
        """The process has ended."""
        self._is_over = True

    def _order(self, session_id: SessionId, control: Control) -> None:
        self._world.after(_SEND_S, partial(self._send_order, session_id, control))

    def _send_order(self, session_id: SessionId, control: Control) -> None:
        if self._is_over:
            return
        request = build_request("streaming_llm", self._names[control], session_id, encode_input(None), {})
        failed = partial(self.slots.failed, session_id)
        self._send_control(triton.Control(request, session_id, control is Control.START, failed), _START_TIMEOUT_S)

    def _release(self) -> None:
        if not self._is_over:
            self.slots.release_overdue()
            self._world.after(_OVERDUE_POLL_S, self._release)
