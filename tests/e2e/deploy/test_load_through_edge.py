"""A load test of what is deployed: real Locust through the real Envoy, with TLS and a token."""

from __future__ import annotations

from pathlib import Path

from load_tests.load.locust_run import LocustRun
from load_tests.load.thresholds import Thresholds
from support.certificates import Authority
from support.edge import Edge, TokenIssuer
from support.served import Start


def test_people_come_through_the_edge(
    start_tiny: Start, edge: Edge, authority: Authority, issuer: TokenIssuer, tmp_path: Path
) -> None:
    """They spoke plain text alone, and so to no server that had been deployed as the docs say."""
    served = start_tiny("--set", "num_threads=1")
    served.wait_until_ready(120)
    edge.serve([served])
    edge.wait_for_healthy(1)
    (tmp_path / "token").write_text(issuer.issue("a tenant"))
    entrance = (f"--tls-ca={authority.certificate}", f"--token-file={tmp_path / 'token'}")
    run = LocustRun(("Beat", "SlowReader"), 3, 8, Thresholds(min_on_time=0.0), tmp_path / "out", more=entrance)
    exit_code, report = run.against(f"https://{edge.address}", served.metrics_url)
    assert (exit_code, report["missed"]) == (0, [])
    assert report["total"]["errors"] == {}
    assert {name for name, seen in report["scenarios"].items() if seen["counts"]} == {"Beat", "SlowReader"}
    assert report["scenarios"]["Beat"]["counts"]["turns"] > 10
    assert report["load_generator"]["users_per_core"] > 0
    # Without the token nobody gets in, and the run says so.
    strangers = LocustRun(("Beat",), 1, 4, Thresholds(min_on_time=0.0), tmp_path / "strangers", more=entrance[:1])
    exit_code, report = strangers.against(f"https://{edge.address}", served.metrics_url)
    assert exit_code != 0
    assert set(report["total"]["errors"]) == {"PERMISSION_DENIED"}
