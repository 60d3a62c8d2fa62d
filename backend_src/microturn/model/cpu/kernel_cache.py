"""Where Numba keeps compiled kernels, and what makes it compile them again.

By itself Numba keeps them beside their sources, and checks only the file with the kernel. Ours are composed from
several files: after a change in another one it would keep running the old code. And they take more than a minute to
compile, so that every environment with the same sources shares them: they are in the model cache, in a directory by
what all these sources say.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core import caching
from numba.core.runtime import rtsys

from microturn.zoo.cache import default_cache_dir

_HERE = Path(__file__).parent
# This directory, and the other files that kernels use.
_SOURCES = (_HERE, *(_HERE.parents[1] / "kv" / name for name in ("page_layout.py", "quantization.py")))
_NUM_KEPT = 4  # of directories by other sources: an older version may still be in use


@functools.cache
def _directory() -> Path:
    """Where the kernels of these sources are; ``NUMBA_CACHE_DIR`` chooses the directory above."""
    digest = hashlib.sha256()
    for source in _SOURCES:
        for file in sorted(source.glob("*.py")) if source.is_dir() else [source]:
            digest.update(file.read_bytes())
    home = Path(config.CACHE_DIR) if config.CACHE_DIR else default_cache_dir() / "kernels"
    return home.absolute() / f"microturn-{digest.hexdigest()[:16]}"


@functools.cache
def _make_room() -> None:
    """Removes the kernels that were compiled longest ago, before those of new sources are."""
    if not _directory().exists():
        others = sorted(_directory().parent.glob("microturn-*"), key=lambda path: path.stat().st_mtime)
        for path in others[:-_NUM_KEPT]:
            shutil.rmtree(path, ignore_errors=True)


class _OfOurSources:
    """Leaves the functions of other packages to Numba's own locators."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        file = Path(py_file).resolve()
        if any(file.is_relative_to(source.resolve()) for source in _SOURCES):
            return super().from_function(py_func, py_file)  # type: ignore[misc]
        return None


# Numba is untyped.
class InCache(_OfOurSources, caching.InTreeCacheLocator):  # type: ignore[misc]
    """Keeps compiled code in the cache."""

    def get_cache_path(self) -> str:
        _make_room()
        return str(_directory())


class BesideSources(_OfOurSources, caching.InTreeCacheLocator):  # type: ignore[misc]
    """Keeps it in `__pycache__`, where the cache cannot be written."""

    def get_disambiguator(self) -> str:
        """A part of the files' names: an index of other sources is not even read.

        It may name classes that are arguments of kernels, and that are gone: Numba unpickles an index before it
        compares the stamp in it.
        """
        return f"{super().get_disambiguator()}-{_directory().name}"


# For all functions that Numba compiles later in this process, unless the user has configured it.
if not config.CACHE_LOCATOR_CLASSES:
    _ours = [f"{__name__}.{locator.__name__}" for locator in (InCache, BesideSources)]
    _numbas = [locator.__name__ for locator in caching.CompileResultCacheImpl._locator_classes]
    config.CACHE_LOCATOR_CLASSES = ",".join(_ours + _numbas)


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """Loads a compiled kernel without getting Numba's compiler ready, which takes a tenth of a second."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # with it kernels allocate memory
        return self._load_overload(sig, target_context)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorates what Python calls; the functions that it is made of are compiled into it and need no cache.

    Args:
        options: further ones of `numba.njit`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, **options)(function)
        dispatcher._cache = _Cache(function)
        return dispatcher

    return decorate
