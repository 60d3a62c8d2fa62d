"""What the chart makes of its values, rendered by the real helm, and what the compose file puts together."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from microturn.zoo.cache import default_cache_dir
from microturn_gateway.arguments import add_gateway_arguments, settings_from
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


def test_of_compose_only_the_edge_and_prometheus_are_beside_the_servers() -> None:
    """Grafana and the gateway were in the inner network too, from which all of Triton's API can be reached."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    inside = {name for name, service in compose["services"].items() if "inside" in service["networks"]}
    assert inside == {"server", "envoy", "prometheus"}
    assert compose["networks"]["inside"]["internal"] is True
    assert "ports" not in compose["services"]["server"]


def test_compose_keeps_compiled_kernels() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (volume,) = [mount for mount in compose["services"]["server"]["volumes"] if mount.endswith(f":{CACHE}")]
    assert volume.split(":")[0] in compose["volumes"]


GATEWAY = ("--set", "gateway.enabled=true")
DIRECT = (*GATEWAY, "--set", "edge.enabled=false")


def gateway_of(*arguments: str) -> dict[str, Any]:
    """The container of the gateway, its pod's other fields beside it."""
    spec: dict[str, Any] = part_of(rendered(*arguments), "Deployment", "check-microturn-gateway")["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod.pop("containers")
    return {"pod": pod, **container}


def test_there_is_no_gateway_unless_it_is_asked_for() -> None:
    assert not [part for part in rendered() if part["metadata"]["name"].endswith("-gateway")]


@pytest.mark.parametrize("arguments", [GATEWAY, DIRECT, ("--values", str(CHART / "examples" / "production.yaml"))])
def test_the_gateway_takes_its_arguments_and_finds_its_files(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """By its own parser, with each file where the chart mounts it."""
    gateway = gateway_of(*arguments)
    assert gateway["command"] == ["microturn-gateway"]
    parser = argparse.ArgumentParser()
    add_gateway_arguments(parser)
    (tmp_path / "secret").write_text("of sixteen characters and more")
    files = [argument.partition("=")[2] for argument in gateway["args"] if "=/" in argument]
    mounted = {mount["mountPath"] for mount in gateway["volumeMounts"] if mount["readOnly"]}
    assert {str(Path(file).parent) for file in files} == mounted
    here = [re.sub("=/.*", f"={tmp_path / 'secret'}", argument) for argument in gateway["args"]]
    settings = settings_from(parser.parse_args(here))
    assert (settings.host, settings.port) == ("0.0.0.0", gateway["ports"][0]["containerPort"])
    assert settings.server_access.has_tls == (arguments != DIRECT)
    assert (settings.server_access.token_file is None) == (arguments == DIRECT)


def test_the_gateway_reaches_the_edge_by_its_service_and_nothing_else() -> None:
    parts = rendered(*GATEWAY)
    edge = part_of(parts, "Service", "check-microturn")
    (port,) = edge["spec"]["ports"]
    assert f"--server=check-microturn.sessions.svc:{port['port']}" in gateway_of(*GATEWAY)["args"]
    (way, names) = egress_of("gateway", *GATEWAY)
    assert way["to"][0]["podSelector"]["matchLabels"] == edge["spec"]["selector"]
    assert way["ports"] == [{"port": 8443}]
    assert {"port": 53, "protocol": "UDP"} in names["ports"]
    assert "gateway" not in json.dumps(part_of(parts, "NetworkPolicy", "check-microturn-server")["spec"]["ingress"])


def test_where_only_some_may_reach_the_edge_the_gateway_may() -> None:
    peers = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    parts = rendered(*GATEWAY, "--set-json", f"networkPolicy.edgeFrom={json.dumps(peers)}")
    policy = part_of(parts, "NetworkPolicy", "check-microturn-edge")
    labels = part_of(parts, "Deployment", "check-microturn-gateway")["spec"]["selector"]["matchLabels"]
    assert policy["spec"]["ingress"][0]["from"] == [*peers, {"podSelector": {"matchLabels": labels}}]


def test_without_an_edge_the_gateway_may_reach_the_servers() -> None:
    parts = rendered(*DIRECT)
    labels = part_of(parts, "Deployment", "check-microturn-gateway")["spec"]["selector"]["matchLabels"]
    (turns,) = part_of(parts, "NetworkPolicy", "check-microturn-server")["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": labels}} in turns["from"]
    assert egress_of("gateway", *DIRECT)[0]["ports"] == [{"port": 8001}]
    assert "--server=check-microturn-servers.sessions.svc:8001" in gateway_of(*DIRECT)["args"]


def test_the_gateway_has_no_rights_and_probes_that_fit() -> None:
    gateway = gateway_of(*GATEWAY)
    assert gateway["pod"]["securityContext"]["runAsNonRoot"] is True
    assert gateway["securityContext"]["readOnlyRootFilesystem"] is True
    assert gateway["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health"
    # A server that is away must not have its gateways killed too.
    assert "httpGet" not in gateway["livenessProbe"]
    # Of the edge's secret the gateway gets what is public.
    (edge,) = [volume for volume in gateway["pod"]["volumes"] if volume["name"] == "edge"]
    assert edge["secret"] == {"secretName": "microturn-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]}


def test_the_gateways_metrics_are_scraped_with_their_own_token() -> None:
    monitor = part_of(
        rendered(*GATEWAY, "--set", "monitoring.serviceMonitor=true"), "ServiceMonitor", "check-microturn-gateway"
    )
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == "http"
    assert endpoint["authorization"] == {"credentials": {"name": "microturn-gateway", "key": "metrics-token"}}


def test_the_gateway_of_compose_takes_its_arguments_and_has_its_secrets(tmp_path: Path) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    gateway = compose["services"]["gateway"]
    assert gateway["entrypoint"] == ["microturn-gateway"]
    parser = argparse.ArgumentParser()
    add_gateway_arguments(parser)
    (tmp_path / "secret").write_text("of sixteen characters and more")
    named = re.findall(r"=/run/secrets/(\w+)", " ".join(gateway["command"]))
    assert sorted(named) == sorted(gateway["secrets"])
    assert set(named) <= compose["secrets"].keys()
    here = [re.sub("=/.*", f"={tmp_path / 'secret'}", argument) for argument in gateway["command"]]
    settings = settings_from(parser.parse_args(here))
    assert settings.server == "envoy:8443"
    assert "envoy" in gateway["depends_on"]
    assert gateway["read_only"] is True


def mounts_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    (container,) = spec["template"]["spec"]["containers"]
    mounts: list[dict[str, Any]] = container["volumeMounts"]
    return mounts


def egress_of(component: str, *arguments: str) -> list[dict[str, Any]]:
    policy = part_of(rendered(*arguments), "NetworkPolicy", f"check-microturn-{component}")
    egress: list[dict[str, Any]] = policy["spec"]["egress"]
    return egress
