"""axe-core, which looks for what keeps people with disabilities from using a page."""

from __future__ import annotations

from pathlib import Path

from microturn.zoo.cache import default_cache_dir
from support.chromium import Page
from support.needed import needed

_AXE = default_cache_dir() / "tools" / "axe.min.js"
_RUN = (
    "axe.run({resultTypes: ['violations']}).then(({violations, passes}) => [passes.length, "
    "violations.flatMap(({id, nodes}) => nodes.map(({html, failureSummary}) => `${id}: ${html} ${failureSummary}`))])"
)


def violations(page: Page) -> list[str]:
    """What it finds on the page as it is now, one entry for each element."""
    if not page.value("'axe' in window"):
        page.value(f"{Path(needed(_AXE, 'make axe')).read_text()}; undefined")
    num_passed, found = page.value(_RUN)
    assert num_passed > 10, "axe-core looked at nothing"
    return list(found)
