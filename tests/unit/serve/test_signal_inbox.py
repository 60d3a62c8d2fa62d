from __future__ import annotations

import subprocess
import sys


def run(script: str) -> str:
    """In a process of its own: an inbox is for life."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True
    ).stdout.strip()


def test_signals_wait_to_be_taken():
    script = """
import os, signal
from microturn.serve.signal_inbox import SignalInbox
inbox = SignalInbox([signal.SIGTERM, signal.SIGINT])
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
print(sorted(inbox.wait(5)), sorted(inbox.wait(0.01)))
"""
    assert run(script) == "[2, 15] []"


def test_a_signal_that_reaches_another_thread_wakes_the_waiting_one():
    """Libraries start threads before anything can be masked; the kernel may choose any of them."""
    script = """
import signal, threading, time
from microturn.serve.signal_inbox import SignalInbox
inbox = SignalInbox([signal.SIGTERM])
other = threading.Thread(target=time.sleep, args=(3,), daemon=True)
other.start()
threading.Timer(0.2, lambda: signal.pthread_kill(other.ident, signal.SIGTERM)).start()
before = time.monotonic()
print(sorted(inbox.wait(10)), time.monotonic() - before < 2)
"""
    assert run(script) == "[15] True"
