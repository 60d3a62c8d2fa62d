"""The thread that sends responses, so that sending costs neither Triton's nor the engine's thread anything."""

from __future__ import annotations

import threading

from microturn.responses import Responses


class ResponseThread:
    """Steps `Responses` until it is stopped."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._thread = threading.Thread(target=self._run, name="microturn-responses", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, after it has sent what was posted."""
        self._responses.close()
        self._thread.join()

    def _run(self) -> None:
        while self._responses.step(block=True):
            pass
