"""What the chart makes of its values, rendered by the real helm, and what the compose file puts together."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import yaml

from microturn.zoo.store import default_cache_dir
from support.edge import DEPLOY
from support.needed import needed

CHART = DEPLOY / "helm" / "microturn"
HELM = default_cache_dir() / "tools" / "helm"
CACHE = "/var/cache/microturn"


def rendered(*arguments: str) -> list[dict[str, Any]]:
    """The chart's objects."""
    helm = needed(HELM, "make deploy-tools")
    command = [helm, "template", "check", "--namespace", "sessions", *arguments, str(CHART)]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return [part for part in yaml.safe_load_all(made.stdout) if part]


def part_of(parts: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (part,) = [part for part in parts if (part["kind"], part["metadata"]["name"]) == (kind, name)]
    return part


def server_of(*arguments: str) -> dict[str, Any]:
    """The StatefulSet of the servers."""
    return part_of(rendered(*arguments), "StatefulSet", "check-microturn-server")["spec"]


@pytest.mark.parametrize("start_seconds", [60, 900, 3600])
def test_a_model_that_is_started_again_may_take_as_long_as_a_first_start(start_seconds: int) -> None:
    """Liveness killed the container after 300 s, while the supervisor may take 900 to start a dead model again."""
    (container,) = server_of("--set", f"server.startSeconds={start_seconds}")["template"]["spec"]["containers"]
    assert f"--start-timeout-s={start_seconds}" in container["args"]
    patience_s = {
        probe: container[probe]["periodSeconds"] * container[probe]["failureThreshold"]
        for probe in ("startupProbe", "livenessProbe")
    }
    assert patience_s["startupProbe"] >= start_seconds
    # Before that it takes the supervisor some time to find out, and a try that failed is not the last one.
    assert patience_s["livenessProbe"] >= start_seconds + 60


def test_compiled_kernels_outlive_their_pod_where_there_is_a_disk_for_them() -> None:
    """They were in an emptyDir, so that each pod of a rollout compiled them anew before it was ready."""
    spec = server_of("--set", "kernelCache.enabled=true,kernelCache.storageClassName=fast,kernelCache.size=3Gi")
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "3Gi"
    assert [mount["name"] for mount in mounts_of(spec) if mount["mountPath"] == CACHE] == [claim["metadata"]["name"]]


@pytest.mark.parametrize("example", ["production", "gpu"])
def test_the_examples_for_many_keep_them(example: str) -> None:
    spec = server_of("--values", str(CHART / "examples" / f"{example}.yaml"))
    (mount,) = [mount for mount in mounts_of(spec) if mount["mountPath"] == CACHE]
    assert mount["name"] in [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]]


def test_without_one_no_claim_is_made() -> None:
    spec = server_of()
    (mount,) = [mount for mount in mounts_of(spec) if mount["mountPath"] == CACHE]
    assert {"name": mount["name"], "emptyDir": {}} in spec["template"]["spec"]["volumes"]
    assert "volumeClaimTemplates" not in spec


COLLECTOR = {
    "ports": [{"port": 4318}],
    "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tracing"}}}],
}


@pytest.mark.parametrize(("value", "component"), [("serversTo", "server"), ("edgeTo", "edge")])
def test_who_is_named_can_be_reached_and_found(value: str, component: str) -> None:
    """Servers reached nobody, so that the spans for `otlp_endpoint` were dropped; the edge reached no `remote_jwks`."""
    egress = egress_of(component, "--set-json", f"networkPolicy.{value}={json.dumps([COLLECTOR])}")
    assert COLLECTOR in egress
    assert any({"port": 53, "protocol": "UDP"} in rule["ports"] for rule in egress)


def test_servers_reach_nobody_else() -> None:
    assert egress_of("server") == []


def test_of_compose_only_the_edge_the_gateway_and_prometheus_are_beside_the_servers() -> None:
    """Grafana was in the inner network too, from which all of Triton's API can be reached."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    inside = {name for name, service in compose["services"].items() if "inside" in service["networks"]}
    assert inside == {"server", "envoy", "gateway", "prometheus"}
    assert compose["networks"]["inside"]["internal"] is True
    assert "ports" not in compose["services"]["server"]


def test_compose_keeps_compiled_kernels() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (volume,) = [mount for mount in compose["services"]["server"]["volumes"] if mount.endswith(f":{CACHE}")]
    assert volume.split(":")[0] in compose["volumes"]


def mounts_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    (container,) = spec["template"]["spec"]["containers"]
    mounts: list[dict[str, Any]] = container["volumeMounts"]
    return mounts


def egress_of(component: str, *arguments: str) -> list[dict[str, Any]]:
    policy = part_of(rendered(*arguments), "NetworkPolicy", f"check-microturn-{component}")
    egress: list[dict[str, Any]] = policy["spec"]["egress"]
    return egress
