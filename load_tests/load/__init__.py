"""Load tests: people on the client library under Locust, what is measured of them, and what comes of it."""
