"""A real Prometheus with our rules, that scrapes a server or a gateway which a test started."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from microturn.serve.child import free_ports
from microturn.zoo.cache import default_cache_dir
from support.edge import DEPLOY
from support.needed import needed

BINARY = default_cache_dir() / "tools" / "prometheus"


class Prometheus:
    """Scrapes one target every half second, as one of our jobs.

    Args:
        directory: for its files.
        metrics_address: `host:port`.
        job_name: of the job.
        token_file: holds the token of a job that wants one.
    """

    def __init__(
        self, directory: Path, metrics_address: str, job_name: str = "microturn", token_file: Path | None = None
    ) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
        (job,) = [job for job in config["scrape_configs"] if job["job_name"] == job_name]
        job["static_configs"] = [{"targets": [metrics_address]}]
        if token_file is not None:
            job["authorization"]["credentials_file"] = str(token_file)
        config["scrape_configs"] = [job]
        path = directory / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self._log = directory / "prometheus.log"
        options = [f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={self.address}"]
        with self._log.open("w") as log:
            command = [needed(BINARY, "make deploy-tools"), f"--config.file={path}", *options, "--log.level=warn"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query; fails where Prometheus refuses it."""
        answer = self._get(f"query?{urllib.parse.urlencode({'query': expression})}")
        result = answer["result"]
        return result if answer["resultType"] == "vector" else [{"metric": {}, "value": result}]

    def value(self, expression: str) -> float:
        """Of the only sample."""
        (sample,) = self.query(expression)
        return float(sample["value"][1])

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, with how its last evaluation went."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def wait_for(self, expression: str, timeout_s: float = 60.0) -> None:
        """Until a query has a result."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            assert self.process.poll() is None, self._log.read_text()
            try:
                if self.query(expression):
                    return
            except OSError:
                pass  # it does not listen yet
            assert time.monotonic() < deadline_s, f"nothing came of {expression}"
            time.sleep(0.2)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}", timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]
