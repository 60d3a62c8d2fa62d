"""For Locust, beside the locustfile: lets users come and go by `--shape`, `--users` and `--run-time`."""

from __future__ import annotations

import time

from locust import LoadTestShape

from load_tests.load.shapes import SHAPES


class Shape(LoadTestShape):
    """One of `SHAPES`."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """How many users there should be now, and how many may come per second; None at the end."""
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        assert options is not None
        num_users = SHAPES[options.shape](
            time.perf_counter() - self.start_time, options.num_users or 1, options.run_time or 60
        )
        return None if num_users is None else (num_users, 100.0)
