"""The thread that sends responses, so that neither Triton's thread nor the engine thread does."""

from __future__ import annotations

import threading

from microturn.triton.responses import Responses


class ResponseThread:
    """Calls `Responses.step` until it is stopped."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._thread = threading.Thread(target=self._run, name="microturn-responses", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the posted answers have been sent."""
        self._responses.close()
        self._thread.join()

    def _run(self) -> None:
        while self._responses.step(block=True):
            pass
