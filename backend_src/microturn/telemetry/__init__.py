"""Telemetry of the engine: metrics, log lines and spans. Open `recorder` first: the engine reports events to it.

Metrics are plain numbers (`families`, `metrics`), which `publisher` gives to Triton; log lines and spans leave the
process from threads of their own (`batch_thread`).
"""
