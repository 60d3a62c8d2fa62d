"""The real Envoy with the edge's configuration, on loopback, before servers that a test starts.

What differs from deploy/envoy/envoy.yaml: ports, the directory of the secrets, and that the servers are listed in a
file instead of a name in the DNS, since each has a health port of its own here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import yaml

from deploy import tokens
from microturn.serve.child import free_ports
from support.needed import needed
from support.served import Served

DEPLOY = Path(__file__).parents[2] / "deploy"
SECRETS = "/etc/envoy/secrets"


class TokenIssuer:
    """A key pair, and the tokens that deploy/tokens.py makes with it.

    Args:
        key: the private key's file, which is made.
    """

    def __init__(self, key: Path) -> None:
        self._key = str(key)
        openssl = needed("openssl", "apt install openssl")
        subprocess.run([openssl, "genrsa", "-out", self._key, "2048"], check=True, capture_output=True)

    def jwks(self) -> str:
        return tokens.jwks(self._key)

    def issue(self, tenant: str, valid_s: float = 3600.0, audience: str = "microturn", name: str = "microturn") -> str:
        return tokens.issue(self._key, tenant, valid_s, audience=audience, issuer=name)


class Edge:
    """A running Envoy.

    Args:
        directory: for its files; `secrets` in it has `tls.crt`, `tls.key` and `jwks.json`.
        config: in place of deploy/envoy/envoy.yaml.
    """

    def __init__(self, directory: Path, config: str | None = None) -> None:
        self._directory = directory
        self._text = config or (DEPLOY / "envoy" / "envoy.yaml").read_text()
        self._secrets = directory / "secrets"
        session_port, metrics_port, admin_port = free_ports(3)
        self.address = f"127.0.0.1:{session_port}"
        self.metrics_address = f"127.0.0.1:{metrics_port}"
        tls = (DEPLOY / "envoy" / "tls.example.yaml").read_text()
        (self._secrets / "tls.yaml").write_text(tls.replace(SECRETS, str(self._secrets)))
        config_path = directory / "envoy.yaml"
        config_path.write_text(yaml.safe_dump(self._config(session_port, metrics_port, admin_port)))
        self.serve([])
        self.log = directory / "envoy.log"
        envoy = Path(sys.executable).parent / "envoy"
        arguments = ["--config-path", str(config_path), "--use-dynamic-base-id", "--concurrency", "1"]
        arguments += ["--file-flush-interval-msec", "100"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([str(envoy), *arguments, "--log-level", "warn"], stdout=log, stderr=log)
        self._wait_until_ready()

    def _config(self, session_port: int, metrics_port: int, admin_port: int) -> dict:
        config = yaml.safe_load(self._text.replace(SECRETS, str(self._secrets)))
        ports = {8443: session_port, 9902: metrics_port, 9901: admin_port}
        admin, servers = config["admin"], config["static_resources"]["clusters"][0]
        addresses = [admin["address"], *(listener["address"] for listener in config["static_resources"]["listeners"])]
        (at_admin,) = config["static_resources"]["clusters"][1]["load_assignment"]["endpoints"][0]["lb_endpoints"]
        for address in (*addresses, at_admin["endpoint"]["address"]):
            address["socket_address"]["address"] = "127.0.0.1"
            address["socket_address"]["port_value"] = ports[address["socket_address"]["port_value"]]
        del servers["cluster_type"]
        self._policy = servers.pop("load_assignment")["policy"]
        listed = {"path_config_source": {"path": str(self._endpoints)}, "resource_api_version": "V3"}
        return config | {
            "static_resources": config["static_resources"]
            | {"clusters": [servers | {"type": "EDS", "eds_cluster_config": {"eds_config": listed}}, *_others(config)]}
        }

    @property
    def _endpoints(self) -> Path:
        return self._directory / "endpoints.json"

    def serve(self, servers: Iterable[Served]) -> None:
        """Lists the servers; Envoy reads the file again when it is replaced."""
        endpoints = [
            {
                "endpoint": {
                    "address": {"socket_address": {"address": "127.0.0.1", "port_value": server.grpc_port}},
                    "health_check_config": {"port_value": server.http_health_port},
                }
            }
            for server in servers
        ]
        kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
        assignment = {"@type": kind, "cluster_name": "servers", "endpoints": [{"lb_endpoints": endpoints}]}
        assignment["policy"] = self._policy
        new = self._endpoints.with_suffix(".new")
        new.write_text(json.dumps({"resources": [assignment]}))
        new.rename(self._endpoints)

    def stats(self) -> str:
        """Its metrics, as Prometheus scrapes them."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/stats/prometheus", timeout=5) as response:
            return response.read().decode()

    def wait_for_log(self, part: str, timeout_s: float = 30.0) -> list[str]:
        """The lines of its log with this part, once there are any."""
        deadline_s = time.monotonic() + timeout_s
        while not (lines := [line for line in self.log.read_text().splitlines() if part in line]):
            assert time.monotonic() < deadline_s, f"nothing of '{part}' is logged"
            time.sleep(0.05)
        return lines

    def wait_for_healthy(self, num_servers: int, timeout_s: float = 30.0) -> None:
        expected = f'envoy_cluster_membership_healthy{{envoy_cluster_name="servers"}} {num_servers}\n'
        deadline_s = time.monotonic() + timeout_s
        while expected not in self.stats():
            assert time.monotonic() < deadline_s, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + 30
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                with urllib.request.urlopen(f"http://{self.metrics_address}/ready", timeout=5):
                    return
            except OSError:
                assert time.monotonic() < deadline_s, self.log.read_text()
                time.sleep(0.05)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _others(config: dict) -> list[dict]:
    return config["static_resources"]["clusters"][1:]
