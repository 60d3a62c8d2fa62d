"""Tests of load_tests.bench.bystanders."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from load_tests.bench import bystanders as module
from load_tests.bench.bystanders import bystanders, warning

# Processor time, not time: on a machine with other work a process gets a part of it.
BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_what_we_and_our_children_use_is_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's clock stands still, so that all that is subtracted from it is ours."""
    monkeypatch.setattr(module, "_all_s", lambda: 5.0)
    before_s = module._own_s()
    with bystanders() as seen:
        end_s = time.process_time() + 0.1
        while time.process_time() < end_s:
            pass
        subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert seen.share == 0.0
    assert module._own_s() - before_s >= 0.35


def test_what_the_machine_did_besides_is(monkeypatch: pytest.MonkeyPatch) -> None:
    busy_s = iter([10.0, 12.0])
    monkeypatch.setattr(module, "_all_s", lambda: next(busy_s))
    monkeypatch.setattr(module, "_own_s", lambda: 1.0)
    monkeypatch.setattr(module.psutil, "cpu_count", lambda: 2)
    with bystanders() as seen:
        time.sleep(0.05)
    assert 1.0 < seen.share <= 2.0 / (2 * 0.05)
    assert "others used" in warning(seen.share)
    assert warning(0.01) == ""
