"""Where a server takes sessions from others."""

from __future__ import annotations

# Host and port.
Address = tuple[str, int]


def read_address(text: str) -> Address:
    """Host and port of ``host:port``.

    Raises:
        ValueError: it is not that.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not 0 < int(port) < 1 << 16:
        raise ValueError(f"'{text}' is not host:port")
    return host.strip("[]"), int(port)
