"""What goes wrong: with streams, processes, disks, clocks and memory. Each kind of fault is a method of its name."""

from __future__ import annotations

import errno
from functools import partial
from typing import NoReturn

from simulation.network import Stream
from simulation.oracle import PassFailed
from simulation.plan import Fault
from simulation.server import Server
from simulation.world import World


class Faults:
    """Has the faults of a plan happen.

    Args:
        world: the clock.
        servers: to whom.
        faults: which.
    """

    def __init__(self, world: World, servers: list[Server], faults: tuple[Fault, ...]) -> None:
        self._world = world
        for fault in faults:
            world.after(fault.at_s, partial(self._happen, fault, servers[fault.server]))

    def _happen(self, fault: Fault, server: Server) -> None:
        self._world.say(f"fault {fault.number}: {fault.kind} at server {server.number} for {fault.for_s} s")
        getattr(self, f"_{fault.kind}")(fault, server)

    # ---- streams -------------------------------------------------------------------------------------------------

    def _break_streams(self, fault: Fault, server: Server) -> None:
        for stream in self._some_streams(fault, server):
            stream.break_off()

    def _mute_streams(self, fault: Fault, server: Server) -> None:
        for stream in self._some_streams(fault, server):
            stream.go_mute()

    def _lose_answers(self, fault: Fault, server: Server) -> None:
        """A proxy on the way loses some: of a stream that lives, which no client can tell but by its silence."""
        for stream in self._some_streams(fault, server):
            if stream.survives_loss:
                stream.lose(1 + fault.choice % 2)

    def _some_streams(self, fault: Fault, server: Server) -> list[Stream]:
        streams = [] if server.triton is None else list(server.triton.streams)
        return [stream for at, stream in enumerate(streams) if fault.choice >> at & 1 or at == fault.choice % 3]

    # ---- processes -----------------------------------------------------------------------------------------------

    def _kill(self, fault: Fault, server: Server) -> None:
        server.kill(fault.for_s)

    def _kill_stub(self, fault: Fault, server: Server) -> None:
        server.kill_stub(fault.for_s)

    def _stop(self, fault: Fault, server: Server) -> None:
        server.stop(fault.for_s)

    def _freeze(self, fault: Fault, server: Server) -> None:
        server.freeze(fault.for_s)

    # ---- the model -----------------------------------------------------------------------------------------------

    def _fail_pass(self, fault: Fault, server: Server) -> None:
        if server.backend is not None:
            if server.drawn.is_asynchronous and fault.choice % 2:
                server.backend.runner.late_error = PassFailed()
            else:
                server.backend.runner.error = PassFailed()

    def _fail_build(self, fault: Fault, server: Server) -> None:
        """The next row of a session cannot be built."""
        running = [] if server.backend is None else list(server.backend.engine._lifecycle.running)
        if running:
            table = running[fault.choice % len(running)].table

            def fail(_: int) -> NoReturn:
                del table.seen
                raise PassFailed

            table.seen = fail  # type: ignore[method-assign]

    def _slow_passes(self, fault: Fault, server: Server) -> None:
        if server.backend is not None:
            runner = server.backend.runner
            runner.slowness = 5.0
            self._world.after(fault.for_s, partial(setattr, runner, "slowness", 1.0))

    def _take_pages(self, fault: Fault, server: Server) -> None:
        """Pressure: sessions lose their pages, as if somebody needed them."""
        if server.is_up and server.backend is not None:
            for _ in range(1 + fault.choice % 3):
                server.backend.engine._tiers.reclaim()

    # ---- disks and clocks ----------------------------------------------------------------------------------------

    def _break_disk(self, fault: Fault, server: Server) -> None:
        self._fail_disk(fault, server, errno.EIO)

    def _fill_disk(self, fault: Fault, server: Server) -> None:
        self._fail_disk(fault, server, errno.ENOSPC)

    def _fail_disk(self, fault: Fault, server: Server, error: int) -> None:
        server.disk.error = error
        self._world.after(fault.for_s, partial(setattr, server.disk, "error", None))

    def _freeze_disk(self, fault: Fault, server: Server) -> None:
        server.disk.frozen_until_s = self._world.now_s + fault.for_s

    def _damage_files(self, fault: Fault, server: Server) -> None:
        server.disk.damage(server.directory, "disk/*/*.safetensors")

    def _jump_wall_clock(self, fault: Fault, server: Server) -> None:
        """An hour and more would end what is saved; less than that changes nothing that clients see."""
        self._world.wall_offset_s += (fault.choice % 3 - 1) * 600.0
