"""Benchmarks through the real server and the client: `python -m load_tests.bench --help`."""
