"""One run of Locust in a process of its own, against a server, headless or with its web page."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_tests.load.thresholds import Thresholds

_LOAD_TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class LocustRun:
    """What is run.

    Attributes:
        people: classes of the locustfile.
        num_users: how many of them.
        run_s: seconds; 0 for as long as nobody stops it.
        thresholds: that it must reach.
        out_dir: where Locust's HTML and CSV files and `report.json` go; it is made.
        shape: of `SHAPES`, or empty for all users at once.
        num_processes: of Locust; with more than one a master and so many workers.
        web_port: of Locust's page on loopback; 0 for none.
        more: options that Locust is given besides.
    """

    people: Sequence[str]
    num_users: int
    run_s: int
    thresholds: Thresholds
    out_dir: Path
    shape: str = ""
    num_processes: int = 1
    web_port: int = 0
    more: tuple[str, ...] = ()

    @property
    def report_path(self) -> Path:
        """Of our own report."""
        return self.out_dir / "report.json"

    def against(self, address: str, metrics_url: str) -> tuple[int, dict[str, Any]]:
        """Runs it; returns Locust's exit code and the report, an empty one where Locust wrote none.

        Args:
            address: of the server's gRPC endpoint.
            metrics_url: of its metrics; empty to leave them out.
        """
        self.report_path.unlink(missing_ok=True)
        used_s, begun_s = _used_by_children_s(), time.monotonic()
        exit_code = self._run(self.command(address, metrics_url))
        cores = (_used_by_children_s() - used_s) / (time.monotonic() - begun_s)
        written = json.loads(self.report_path.read_text()) if self.report_path.exists() else {}
        if seconds := written.get("seconds"):
            num_users = sum(second["num_users"] for second in seconds) / len(seconds)
            written["load_generator"] = {"cores": round(cores, 3), "users_per_core": round(num_users / cores, 1)}
        return exit_code or (0 if written else 1), written

    def _run(self, command: Sequence[str]) -> int:
        with subprocess.Popen(command, cwd=_LOAD_TESTS.parent) as locust:
            try:
                return locust.wait()
            except KeyboardInterrupt:
                if self.web_port:  # nothing else ends it; Locust has been told as well, and is about to report
                    return locust.wait()
                locust.kill()
                raise

    def command(self, address: str, metrics_url: str) -> list[str]:
        """The command line of Locust."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        out_dir = self.out_dir.resolve()
        files = [_LOAD_TESTS / "locustfile.py", *([_LOAD_TESTS / "shapefile.py"] if self.shape else [])]
        command = [sys.executable, "-m", "locust", "-f", ",".join(map(str, files)), *self.people]
        command += ["--host", address, "--users", str(self.num_users), "--spawn-rate", "100", "--stop-timeout", "2"]
        command += ["--html", str(out_dir / "locust.html"), "--csv", str(out_dir / "locust")]
        command += ["--report", str(out_dir / "report.json"), "--metrics-url", metrics_url]
        limits = self.thresholds
        command += ["--min-on-time", str(limits.min_on_time), "--max-errors", str(limits.max_errors)]
        command += ["--max-p99-ms", str(limits.max_p99_ms), *self.more]
        if self.run_s:
            command += ["--run-time", f"{self.run_s}s"]
        if self.shape:
            command += ["--shape", self.shape]
        if self.num_processes > 1:
            command += ["--processes", str(self.num_processes)]
        if self.web_port:
            return [*command, "--web-host", "127.0.0.1", "--web-port", str(self.web_port), "--class-picker"]
        return [*command, "--headless", "--only-summary", "--loglevel", "WARNING"]


def _used_by_children_s() -> float:
    """Processor time of all children that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
