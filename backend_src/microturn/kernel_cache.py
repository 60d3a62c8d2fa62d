"""Has Numba compile kernels again when any file that they are made of has changed.

By itself it looks at the file in which a kernel stands. Ours are put together out of several: after a change in one of
the others the old code would go on running. Where compiled code is kept remains Numba's choice.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from numba import config
from numba.core import caching

_PACKAGE = Path(__file__).parent
# Directories whole, and what kernels take from elsewhere.
_SOURCES = (_PACKAGE / "attention", _PACKAGE / "layers", _PACKAGE / "kv_quantization.py")


@functools.cache
def _stamp() -> bytes:
    digest = hashlib.sha256()
    for source in _SOURCES:
        for file in sorted(source.glob("*.py")) if source.is_dir() else [source]:
            digest.update(file.read_bytes())
    return digest.digest()


class _Stamped:
    def get_source_stamp(self) -> Any:
        """What Numba compares: the kernel's own file, as before, and all the others."""
        return super().get_source_stamp(), _stamp()  # type: ignore[misc]


# Numba has no types.
class InGivenDirectory(_Stamped, caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """Keeps compiled code where NUMBA_CACHE_DIR says."""


class BesideSources(_Stamped, caching.InTreeCacheLocator):  # type: ignore[misc]
    """Keeps it in `__pycache__`."""


class OfUser(_Stamped, caching.UserWideCacheLocator):  # type: ignore[misc]
    """Keeps it in the user's cache directory, where the sources' own cannot be written."""


def watch_all_sources() -> None:
    """Takes effect for kernels that are decorated from now on, unless the user has chosen Numba's locators."""
    if not config.CACHE_LOCATOR_CLASSES:
        locators = (InGivenDirectory, BesideSources, OfUser)
        config.CACHE_LOCATOR_CLASSES = ",".join(f"{__name__}.{locator.__name__}" for locator in locators)
