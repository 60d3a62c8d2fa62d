"""An engine with what stands beside it in a server, whatever hosts it: the admin socket, the fleet, the saver."""

from __future__ import annotations

import gc
from pathlib import Path

from microturn.admin.fleet import Fleet
from microturn.admin.operations import Operations
from microturn.admin.saver import Saver
from microturn.admin.socket_server import AdminSocket
from microturn.engine.loading import start_engine
from microturn.settings import Settings


class HostedEngine:
    """Loads a model and runs its engine.

    Attributes:
        engine: runs in its own thread.
        operations: on it, for administrators and for a stop.

    Args:
        settings: how to run.
        fleet: this server among others of its model; None if it is alone.

    Raises:
        InvalidArgument: the model cannot be loaded or served, or the settings do not fit it.
    """

    def __init__(self, settings: Settings, fleet: Fleet | None) -> None:
        self._settings = settings
        self._fleet = fleet
        peers = None if fleet is None else fleet.peers
        self.engine = start_engine(settings, None if peers is None else peers.fetch)
        self.operations = Operations(self.engine, peers, self._stop_moving)
        self._saver: Saver | None = None
        self._admin: AdminSocket | None = None

    def open(self) -> None:
        """Begins to save sessions, to take them from other servers, and to listen to administrators.

        The process should have had Python's collector of garbage off until then, since it has loaded a model.

        Raises:
            InvalidArgument: a port is in use, or a socket cannot be made.
        """
        engine, settings = self.engine, self._settings
        if engine.snapshots is not None and settings.snapshot_every_s:
            self._saver = Saver(engine, engine.snapshots, settings.snapshot_every_s)
        if settings.admin_socket:
            self._admin = AdminSocket(Path(settings.admin_socket), self.operations.answer)
        if self._fleet is not None:
            self._fleet.join(engine)
        # Objects of libraries and the model are permanent. Scanning them for garbage stops all turns for 165 ms.
        gc.collect()
        gc.freeze()
        gc.enable()

    def close(self) -> None:
        """Ends running turns and the threads."""
        if self._saver is not None:
            self._saver.close()
        if self._fleet is not None:
            self._fleet.leave()
        if self._admin is not None:
            self._admin.close()
        self.engine.stop()

    def _stop_moving(self, within_s: float) -> None:
        """Sessions are neither saved nor moved any more but for whoever called this."""
        if self._fleet is not None:
            self._fleet.stop_rebalancing()
        if self._saver is not None:
            self._saver.stop(within_s)
