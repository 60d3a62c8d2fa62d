"""The chart, rendered by the real helm."""

from __future__ import annotations

import subprocess
from typing import Any

import yaml

from microturn.zoo.cache import default_cache_dir
from support.edge import DEPLOY
from support.needed import needed

CHART = DEPLOY / "helm" / "microturn"
HELM = default_cache_dir() / "tools" / "helm"


def render(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `helm template` says to these arguments, whatever its exit code."""
    helm = needed(HELM, "make deploy-tools")
    command = [helm, "template", "check", "--namespace", "sessions", *arguments, str(CHART)]
    return subprocess.run(command, capture_output=True, text=True)


def rendered(*arguments: str) -> list[dict[str, Any]]:
    """The chart's objects."""
    made = render(*arguments)
    assert made.returncode == 0, made.stderr
    return [part for part in yaml.safe_load_all(made.stdout) if part]


def part_of(parts: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (part,) = [part for part in parts if (part["kind"], part["metadata"]["name"]) == (kind, name)]
    return part


def envoy_of(*arguments: str) -> str:
    """The edge's configuration."""
    config: str = part_of(rendered(*arguments), "ConfigMap", "check-microturn-edge")["data"]["envoy.yaml"]
    return config
