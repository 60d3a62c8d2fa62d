"""A gateway for browsers and for what speaks OpenAI's APIs: one WebSocket is one Microturn session.

`realtime`, `context` and their like are pure: they know events, items and positions, and do no I/O. `app`, `websocket`,
`completions` and `responses` are the shell around them: Starlette on one side, `microturn_client` on the other.
"""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("microturn-client")
except _metadata.PackageNotFoundError:  # runs from its sources, without being installed
    __version__ = "unknown"
