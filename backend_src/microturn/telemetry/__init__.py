"""Telemetry of the engine: metrics, log lines and spans. Open `recorder` first: the engine reports events to it.

Knows turns and sessions, but not the engine; of Triton only the class of its metric families (`publisher`). Metrics are
plain numbers (`families`, `metrics`); log lines and spans leave the process from threads of their own (`batch_thread`).
"""
