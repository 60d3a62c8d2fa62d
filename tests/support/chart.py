"""The chart, rendered by the real helm."""

from __future__ import annotations

import argparse
import subprocess
from typing import Any

import yaml

from microturn.serve.options import ServeOptions, add_serve_arguments, read_options
from microturn.zoo.cache import default_cache_dir
from support.edge import DEPLOY
from support.needed import needed

CHART = DEPLOY / "helm" / "microturn"
PRODUCTION = ("--values", str(CHART / "examples" / "production.yaml"))
HELM = default_cache_dir() / "tools" / "helm"


def render(*arguments: str, release: str = "check") -> subprocess.CompletedProcess[str]:
    """What `helm template` says to these arguments, whatever its exit code."""
    helm = needed(HELM, "make deploy-tools")
    command = [helm, "template", release, "--namespace", "sessions", *arguments, str(CHART)]
    return subprocess.run(command, capture_output=True, text=True)


def rendered(*arguments: str, release: str = "check") -> list[dict[str, Any]]:
    """The chart's objects."""
    made = render(*arguments, release=release)
    assert made.returncode == 0, made.stderr
    return [part for part in yaml.safe_load_all(made.stdout) if part]


def part_of(parts: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (part,) = [part for part in parts if (part["kind"], part["metadata"]["name"]) == (kind, name)]
    return part


def envoy_of(*arguments: str) -> str:
    """The edge's configuration."""
    config: str = part_of(rendered(*arguments), "ConfigMap", "check-microturn-edge")["data"]["envoy.yaml"]
    return config


def spec_of(kind: str, name: str, *arguments: str) -> dict[str, Any]:
    spec: dict[str, Any] = part_of(rendered(*arguments), kind, f"check-microturn-{name}")["spec"]
    return spec


def server_of(*arguments: str) -> dict[str, Any]:
    """The server's container, its pod's other fields beside it."""
    pod = spec_of("StatefulSet", "server", *arguments)["template"]["spec"]
    (container,) = pod.pop("containers")
    return {"pod": pod, **container}


def options_of(server: dict[str, Any]) -> ServeOptions:
    """By the server's own parser."""
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return read_options(parser.parse_args(server["args"]))
