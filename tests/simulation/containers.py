"""How much everything holds that lives as long as the engine: who grows with what has been and gone is found here.

All objects of the product that can be reached from the engine are walked, and each container that one of them has as an
attribute is counted under its path. When everybody has gone, it must hold no more than before anybody came, but for
what is kept on purpose.
"""

from __future__ import annotations

import queue
from collections import deque
from typing import Any

_CONTAINERS = (dict, list, deque, set, queue.SimpleQueue)

# Kept on purpose, by the end of the path: as many as the pool has pages; or so many.
_OF_PAGES = ("_prefixes.", "_pool.")
_MEANT = {
    "_sessions._ended": 100_000,  # for who comes back, and is told why
    "_sessions._expiries": 1000,  # entries of sessions that were replaced go when their time has come
    "watchers.1._sequences": 8192,  # an eighth of the slots, for clients that come back to sessions that ended
    "watchers.1._kept": 8192,
    "series": 100,  # of metrics, by their labels
}


def sizes_of(root: object) -> dict[str, int]:
    """The size of each container, by its path from the root."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def walk(value: object, path: str) -> None:
        if isinstance(value, _CONTAINERS):
            sizes[path] = value.qsize() if isinstance(value, queue.SimpleQueue) else len(value)
        elif isinstance(value, tuple):
            for number, part in enumerate(value):
                walk(part, f"{path}.{number}")
        elif type(value).__module__.startswith("microturn.") and id(value) not in seen:
            seen.add(id(value))
            for name, part in _attributes(value).items():
                walk(part, f"{path}.{name}")

    walk(root, "engine")
    return sizes


def most_at(path: str, num_pages: int) -> int:
    """How many more things than at the start may be there."""
    if any(part in path for part in _OF_PAGES):
        return num_pages
    return next((most for end, most in _MEANT.items() if path.endswith(end)), 0)


def _attributes(value: object) -> dict[str, Any]:
    slots = {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}
