"""What the chart makes of `handOver`, rendered by the real helm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microturn.admin.fleet import Fleet
from microturn.settings import Settings
from support.chart import PRODUCTION, options_of, render, server_of, spec_of

SECRET = ("--set", "handOver.keySecretName=shared,handOver.movesPerMinute=7")
PORT = 8005
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


@pytest.mark.parametrize("arguments", [SECRET, PRODUCTION])
def test_servers_are_told_of_each_other(arguments: tuple[str, ...], tmp_path: Path) -> None:
    options = options_of(server_of(*arguments))
    assert options.peer_port == PORT
    assert options.settings["edge_address"] == "$(POD_IP):8001"
    # The name of the headless Service has the address of each server.
    assert spec_of("Service", "servers", *arguments)["clusterIP"] == "None"
    assert options.settings["peers"] == f"check-microturn-servers.sessions.svc:{PORT}"
    key = tmp_path / "key"
    key.write_text("of sixteen characters and more")
    here = {**options.settings, "peer_address": f"0.0.0.0:{PORT}", "peer_key_file": str(key)}
    assert Fleet.of(Settings.from_strings(here)) is not None


def test_the_number_of_moves_is_bounded() -> None:
    assert options_of(server_of(*SECRET)).settings["moves_per_minute"] == "7"


def test_a_server_knows_its_address_and_has_the_environment_of_the_values() -> None:
    added = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    server = server_of(*SECRET, "--set-json", f"server.extraEnv={json.dumps([added])}")
    assert server["env"] == [POD_IP, added]


def test_without_an_edge_there_is_no_route() -> None:
    server = server_of(*SECRET, "--set", "edge.enabled=false")
    assert options_of(server).peer_port == PORT
    assert "edge_address" not in options_of(server).settings
    assert "env" not in server


def test_the_key_can_be_read_by_the_server_alone() -> None:
    server = server_of(*SECRET)
    (volume,) = [volume for volume in server["pod"]["volumes"] if volume["name"] == "peers"]
    items = [{"key": "key", "path": "key"}]
    assert volume["secret"] == {"secretName": "shared", "defaultMode": 0o440, "items": items}
    assert server["pod"]["securityContext"]["fsGroup"] == server["pod"]["securityContext"]["runAsUser"]
    (mount,) = [mount for mount in server["volumeMounts"] if mount["name"] == "peers"]
    assert mount["readOnly"] is True
    assert options_of(server).settings["peer_key_file"] == f"{mount['mountPath']}/key"


def test_servers_reach_each_other_and_nobody_else_reaches_that_port() -> None:
    assert {"name": "peers", "containerPort": PORT} in server_of(*SECRET)["ports"]
    service = spec_of("Service", "servers", *SECRET)
    assert {"name": "peers", "port": PORT, "targetPort": "peers"} in service["ports"]
    servers = [{"podSelector": {"matchLabels": service["selector"]}}]
    policy = spec_of("NetworkPolicy", "server", *SECRET)
    assert [rule["from"] for rule in policy["ingress"] if {"port": "peers"} in rule["ports"]] == [servers]
    (way, names) = policy["egress"]
    assert way == {"ports": [{"port": PORT}], "to": servers}
    assert {"port": 53, "protocol": "UDP"} in names["ports"]


def test_who_else_is_named_can_be_reached_too() -> None:
    collector = {"ports": [{"port": 4318}], "to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}
    named = f"networkPolicy.serversTo={json.dumps([collector])}"
    egress = spec_of("NetworkPolicy", "server", *SECRET, "--set-json", named)["egress"]
    assert egress[0] == collector
    assert [rule["ports"][0]["port"] for rule in egress] == [4318, PORT, 53]


def test_without_the_secret_there_is_none_of_it() -> None:
    server = server_of()
    assert "env" not in server
    said = json.dumps([server, spec_of("Service", "servers"), spec_of("NetworkPolicy", "server")])
    assert not [word for word in ("peer", str(PORT), "moves_per_minute") if word in said]


@pytest.mark.parametrize("name", ["peer_address", "peers", "peer_key_file", "edge_address", "moves_per_minute"])
def test_settings_that_the_chart_makes_are_not_set_beside_it(name: str) -> None:
    refused = render(*SECRET, "--set", f"server.settings.{name}=1")
    assert refused.returncode != 0
    assert f"invalid propertyName '{name}'" in refused.stderr
