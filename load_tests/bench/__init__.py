"""Benchmarks, through the real server and the client where they concern those: `python -m load_tests.bench --help`."""
