"""What the chart makes of its values, rendered by the real helm, and what the compose file puts together."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from microturn_gateway.arguments import add_gateway_arguments, settings_from
from support.chart import CHART, envoy_of, part_of, render, rendered
from support.edge import DEPLOY

CACHE = "/var/cache/microturn"


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


def test_a_pod_has_what_its_values_add() -> None:
    added = {
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraVolumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
        "extraVolumeMounts": [{"name": "authorities", "mountPath": "/authorities"}],
        "initContainers": [{"name": "first", "image": "busybox"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "rollout": {"maxUnavailable": "25%", "partition": 2},
        "probes": {"startup": {"periodSeconds": 7}, "readiness": {"failureThreshold": 4}},
    }
    spec = server_of("--set-json", f"server={json.dumps(added)}", "--set", "server.startSeconds=900")
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["env"] == added["extraEnv"]
    assert added["extraVolumes"][0] in pod["volumes"]
    assert added["extraVolumeMounts"][0] in container["volumeMounts"]
    assert pod["initContainers"] == added["initContainers"]
    assert pod["affinity"] == added["affinity"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": added["rollout"]}
    startup, readiness = container["startupProbe"], container["readinessProbe"]
    assert (startup["periodSeconds"], startup["timeoutSeconds"], startup["failureThreshold"]) == (7, 2, 129)
    assert (readiness["periodSeconds"], readiness["failureThreshold"]) == (2, 4)


@pytest.mark.parametrize(("component", "arguments"), [("edge", ()), ("gateway", ("--set", "gateway.enabled=true"))])
def test_replicas_keep_apart_unless_told_where_to_run(component: str, arguments: tuple[str, ...]) -> None:
    def pod_of(*more: str) -> dict[str, Any]:
        parts = rendered(*arguments, *more)
        return part_of(parts, "Deployment", f"check-microturn-{component}")["spec"]["template"]["spec"]

    (apart,) = pod_of()["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = apart["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == component
    where = {"affinity": {"nodeAffinity": {}}, "nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "edge"}]}
    told = pod_of("--set-json", f"{component}={json.dumps(where)}")
    assert {name: told[name] for name in where} == where


DOWNLOAD = ("--set", "model.download.repository=meta-llama/Llama-3.2-1B,model.download.revision=4e20de3")


def test_a_model_is_downloaded_before_the_server_starts_with_it() -> None:
    spec = server_of(*DOWNLOAD, "--set", "model.download.tokenSecretName=hub,model.download.size=9Gi")
    pod = spec["template"]["spec"]
    (download,) = pod["initContainers"]
    (server,) = pod["containers"]
    assert download["image"] == server["image"]
    assert download["command"][:3] == ["hf", "download", "meta-llama/Llama-3.2-1B"]
    assert {"--revision=4e20de3", "--local-dir=/models"} <= set(download["command"])
    environment = {variable["name"]: variable for variable in download["env"]}
    assert environment["HF_HUB_OFFLINE"]["value"] == "0"
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert "--model=/models" in server["args"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "9Gi"
    for container, is_read_only in ((download, False), (server, True)):
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/models"]
        assert (mount["name"], mount.get("readOnly", False)) == (claim["metadata"]["name"], is_read_only)
    # Its other files are where it may write.
    assert download["securityContext"]["readOnlyRootFilesystem"] is True
    assert environment["HF_HOME"]["value"] in [mount["mountPath"] for mount in download["volumeMounts"]]


def test_the_command_that_downloads_is_there() -> None:
    """In the image as here: it comes with what the model's libraries need."""
    said = subprocess.run([Path(sys.executable).parent / "hf", "download", "--help"], capture_output=True, text=True)
    assert said.returncode == 0
    assert {"--revision", "--local-dir"} <= set(re.findall(r"--[a-z-]+", said.stdout))


def test_a_model_has_one_place() -> None:
    refused = render(*DOWNLOAD, "--set", "model.existingClaim=models")
    assert refused.returncode != 0
    assert "model" in refused.stderr


def test_the_edge_checks_tokens_as_its_values_say() -> None:
    tokens = {"issuer": "https://login.example/", "audiences": ["a", "b"]}
    config = yaml.safe_load(
        envoy_of("--set-json", f"edge.tokens={json.dumps(tokens)}", "--set", "edge.heapBytes=300000000")
    )
    (provider,) = [filter["typed_config"]["providers"] for filter in filters_of(config) if "jwt" in filter["name"]]
    assert provider["microturn"]["issuer"] == tokens["issuer"]
    assert provider["microturn"]["audiences"] == tokens["audiences"]
    assert "local_jwks" in provider["microturn"]
    monitors = config["overload_manager"]["resource_monitors"]
    assert 300_000_000 in [monitor["typed_config"].get("max_heap_size_bytes") for monitor in monitors]


def filters_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    (connections,) = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    found: list[dict[str, Any]] = connections["typed_config"]["http_filters"]
    return found


def test_the_edge_may_ask_servers_for_their_health() -> None:
    """At the port that its configuration names."""
    (servers,) = [c for c in yaml.safe_load(envoy_of())["static_resources"]["clusters"] if c["name"] == "servers"]
    (endpoint,) = servers["load_assignment"]["endpoints"][0]["lb_endpoints"]
    port = endpoint["endpoint"]["health_check_config"]["port_value"]
    assert {"port": port} in egress_of("edge")[0]["ports"]
    (container,) = server_of()["template"]["spec"]["containers"]
    (name,) = [known["name"] for known in container["ports"] if known["containerPort"] == port]
    ingress = part_of(rendered(), "NetworkPolicy", "check-microturn-server")["spec"]["ingress"]
    assert {"port": name} in ingress[0]["ports"]
    (start,) = [
        line for line in (DEPLOY.parent / "Dockerfile").read_text().splitlines() if line.startswith("ENTRYPOINT")
    ]
    assert f"--http-health-port={port}" in json.loads(start.removeprefix("ENTRYPOINT"))


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


@pytest.mark.parametrize("release", ["r" * 53, f"microturn-{'r' * 43}"])
def test_names_of_the_longest_release_fit_what_kubernetes_makes_of_them(release: str) -> None:
    """Servers of a release of 36 characters and more never got a pod: the label with their revision was too long."""
    parts = rendered("--values", str(CHART / "examples" / "production.yaml"), release=release)
    lengths = {(part["kind"], part["metadata"]["name"]): len(part["metadata"]["name"]) for part in parts}
    # The label `controller-revision-hash` is the name of the StatefulSet and a hash of up to ten characters.
    lengths |= {of: length + len("-4294967295") for of, length in lengths.items() if of[0] == "StatefulSet"}
    assert len({kind for kind, _ in lengths}) >= 8
    assert {of: length for of, length in lengths.items() if length > 63} == {}


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
