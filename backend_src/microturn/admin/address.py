"""The address of a Unix socket, however long its path: the kernel takes 107 bytes, and directories may be deep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for `bind` or `connect`, good as long as the block lasts.

    Raises:
        OSError: the directory is not there.
    """
    directory = os.open(path.absolute().parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
