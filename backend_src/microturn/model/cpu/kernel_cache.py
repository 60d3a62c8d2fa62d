"""Makes Numba recompile kernels when any of their source files has changed.

Numba checks only the file with the kernel itself. Our kernels are composed from several files: after a change in
another one Numba would keep running the old code. Where compiled code is cached remains Numba's choice.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from numba import config
from numba.core import caching

_HERE = Path(__file__).parent
# This directory, and the other files that kernels use.
_SOURCES = (_HERE, *(_HERE.parents[1] / "kv" / name for name in ("page_layout.py", "quantization.py")))


@functools.cache
def _stamp() -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        for file in sorted(source.glob("*.py")) if source.is_dir() else [source]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


class _Stamped:
    def get_disambiguator(self) -> str:
        """A part of the files' names, with the stamp of all sources: an index of others is not even read.

        It may name classes that are arguments of kernels, and that are gone: Numba unpickles an index before it
        compares the stamp in it.
        """
        return f"{super().get_disambiguator()}-{_stamp()[:16]}"  # type: ignore[misc]


# Numba is untyped.
class InGivenDirectory(_Stamped, caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """Keeps compiled code where NUMBA_CACHE_DIR says."""


class BesideSources(_Stamped, caching.InTreeCacheLocator):  # type: ignore[misc]
    """Keeps it in `__pycache__`."""


class OfUser(_Stamped, caching.UserWideCacheLocator):  # type: ignore[misc]
    """Keeps it in the user's cache directory, where the sources' own cannot be written."""


def watch_all_sources() -> None:
    """Installs the locators for kernels decorated later, unless the user has configured Numba's locators."""
    if not config.CACHE_LOCATOR_CLASSES:
        locators = (InGivenDirectory, BesideSources, OfUser)
        config.CACHE_LOCATOR_CLASSES = ",".join(f"{__name__}.{locator.__name__}" for locator in locators)
