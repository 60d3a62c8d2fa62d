"""Tests of settings."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from microturn.errors import InvalidArgument
from microturn.settings import MAX_IDLE_TIMEOUT_S, Settings


def test_without_values_there_are_the_defaults() -> None:
    assert Settings.from_strings({}) == Settings()


def test_without_a_proxy_that_names_tenants_there_is_no_bound_for_them() -> None:
    assert Settings().max_sessions_per_tenant == 0


def test_nothing_is_kept_outside_the_pool_unless_it_is_asked_for() -> None:
    """On a CPU the pool is host memory itself, and nobody's disk is filled unasked."""
    assert (Settings().host_tier_bytes, Settings().disk_tier_dir) == (0, "")


def test_parts_of_the_gpus_path_can_be_turned_off() -> None:
    assert (Settings().cuda_graphs, Settings().compiled_glue) == (True, True)
    read = Settings.from_strings({"cuda_graphs": "false", "compiled_glue": "false"})
    assert (read.cuda_graphs, read.compiled_glue) == (False, False)


def test_every_type_is_read_from_text() -> None:
    read = Settings.from_strings(
        {"model_dir": "models/a b", "max_sessions": "7", "idle_timeout_s": "2.5", "share_prefixes": "true"}
    )
    assert read == Settings(model_dir="models/a b", max_sessions=7, idle_timeout_s=2.5, share_prefixes=True)


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().page_size = 8  # type: ignore[misc]


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(InvalidArgument, match="unknown setting 'max_session': did you mean 'max_sessions'"):
        Settings.from_strings({"max_session": "7"})


def test_a_name_like_no_other_is_refused_with_all_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"unknown setting 'zzz': known are: admin_socket, attention, .*weights"):
        Settings.from_strings({"zzz": "7"})


@pytest.mark.parametrize(
    ("name", "text", "type_name"),
    [
        ("page_size", "sixteen", "int"),
        ("page_size", "16.0", "int"),
        ("page_size", "", "int"),
        ("max_sessions", "9" * 5000, "int"),
        ("idle_timeout_s", "soon", "float"),
        ("share_prefixes", "True", "bool"),
        ("share_prefixes", "1", "bool"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, text: str, type_name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"setting '{name}' is of type {type_name}"):
        Settings.from_strings({name: text})


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("kv_tokens", 0),
        ("page_size", 1),
        ("max_sessions", 1),
        ("max_sessions_per_tenant", 0),
        ("max_batch_tokens", 1),
        ("max_context", 0),
        ("max_queued_turns", 1),
        ("host_tier_bytes", 0),
        ("disk_tier_bytes", 0),
    ],
)
def test_numbers_have_a_least_value(name: str, least: int) -> None:
    assert getattr(Settings.from_strings({name: str(least)}), name) == least
    with pytest.raises(InvalidArgument, match=f"setting '{name}' is at least {least}, not {least - 1}"):
        Settings.from_strings({name: str(least - 1)})


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), MAX_IDLE_TIMEOUT_S + 1])
def test_the_idle_time_stays_below_tritons(bad: float) -> None:
    with pytest.raises(InvalidArgument, match="setting 'idle_timeout_s' is above 0 and at most 3600"):
        Settings(idle_timeout_s=bad)


@pytest.mark.parametrize(("name", "bad"), [("weights", "float16"), ("attention", "flash"), ("kv_dtype", "fp8")])
def test_a_choice_outside_the_list_is_refused_with_the_list(name: str, bad: str) -> None:
    values: dict[str, Any] = {name: bad}
    with pytest.raises(InvalidArgument, match=rf"setting '{name}' is one of auto, .*, not '{bad}'"):
        Settings(**values)


@pytest.mark.parametrize("ttl_s", ["0", "-1", "nan", "inf"])
def test_a_saved_session_has_some_time_to_live(ttl_s: str) -> None:
    with pytest.raises(InvalidArgument, match="snapshot_ttl_s"):
        Settings.from_strings({"snapshot_ttl_s": ttl_s})


@pytest.mark.parametrize(("num_slots", "max_sessions"), [(2, 1), (3, 2), (4, 3), (8, 6), (300, 225), (65536, 256)])
def test_a_quarter_of_tritons_slots_stays_free_of_sessions(num_slots: int, max_sessions: int) -> None:
    """With as many sessions as slots, one more START waited in silence where it should be refused."""
    assert Settings().within_slots(num_slots) == replace(Settings(), max_sessions=max_sessions)


def test_a_single_slot_is_too_few() -> None:
    with pytest.raises(InvalidArgument, match=r"max_candidate_sequences .* is at least 2, not 1"):
        Settings().within_slots(1)
