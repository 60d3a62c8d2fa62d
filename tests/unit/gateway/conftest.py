"""A realtime session that has begun."""

from __future__ import annotations

import pytest

from support.realtime_driver import Driver


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    [created] = driver.taken()
    assert created["type"] == "session.created"
    assert created["session"]["model"] == "tiny"
    return driver
