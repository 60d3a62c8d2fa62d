"""For Locust: `python -m locust -f load_tests/locustfile.py --host localhost:8001 Beat`; see docs/load-tests.md."""

from __future__ import annotations

import grpc.experimental.gevent
from locust import events

from load_tests.load import locust_hooks
from load_tests.load.scenarios import BargeIn, Beat, Chat, Churn, Herd, LongSession
from load_tests.load.slow_reader import SlowReader

# Locust looks for these by name, here.
__all__ = ["BargeIn", "Beat", "Chat", "Churn", "Herd", "LongSession", "SlowReader"]

# Before any channel is made: else gRPC would wait in real threads, and everybody with it.
grpc.experimental.gevent.init_gevent()
locust_hooks.install(events)
