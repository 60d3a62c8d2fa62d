"""The alerts' own stories, told by the real promtool."""

from __future__ import annotations

import subprocess

from microturn.zoo.cache import default_cache_dir
from support.edge import DEPLOY
from support.needed import needed

PROMTOOL = default_cache_dir() / "tools" / "promtool"


def test_each_alert_fires_on_its_story_and_on_no_other() -> None:
    """Two paged for as long as the chart's edge was scraped, and one on every rollout."""
    command = [needed(PROMTOOL, "make deploy-tools"), "test", "rules", "rules.test.yml"]
    told = subprocess.run(command, cwd=DEPLOY / "prometheus", capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "SUCCESS" in told.stdout
