"""A real etcd on loopback."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

from microturn.serve.child import free_ports
from microturn.zoo.cache import default_cache_dir
from support.needed import needed

BINARY = default_cache_dir() / "tools" / "etcd"


class Etcd:
    """One member, without authentication.

    Attributes:
        url: where clients find it.

    Args:
        directory: for its files.
    """

    def __init__(self, directory: Path) -> None:
        self.url, self._peer_url = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
        self._data = directory / "etcd"
        self._log = directory / "etcd.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """With the data of the one before."""
        assert self._process is None
        clients, peers = self.url, self._peer_url
        urls = [f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"]
        urls += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        command = [needed(BINARY, "make deploy-tools"), f"--data-dir={self._data}", *urls]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*command, f"--initial-cluster=default={peers}"], stdout=log, stderr=log)
        deadline_s = time.monotonic() + 30
        while not self._is_healthy():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, self._log.read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """Has the next one begin without data."""
        assert self._process is None
        shutil.rmtree(self._data)

    close = kill

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False
