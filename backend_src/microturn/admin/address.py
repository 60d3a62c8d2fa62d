"""The address of a Unix socket with a path of any length: the kernel's limit is 107 bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for `bind` or `connect`, valid within the `with` block.

    Raises:
        OSError: the directory does not exist.
    """
    directory = os.open(path.absolute().parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
