from __future__ import annotations

import argparse

import pytest

from microturn.serve.errors import ServeError
from microturn.serve.options import ServeOptions, add_serve_arguments, default_model_repository, read_options


def parse(*arguments: str) -> ServeOptions:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return read_options(parser.parse_args(arguments))


def test_defaults_serve_the_shipped_repository_on_loopback():
    options = parse()
    assert options.host == "127.0.0.1"
    assert options.ports() == {"--grpc-port": 8001, "--metrics-port": 8002, "--health-port": 8003}
    assert options.model_repository == default_model_repository()
    assert (options.model_repository / "streaming_llm" / "config.pbtxt").is_file()
    assert options.settings == {}


def test_ports_that_are_closed_by_default_are_named_once_open():
    options = parse("--http-port", "8000", "--http-health-port", "8004")
    assert options.ports()["--http-port"] == 8000
    assert options.ports()["--http-health-port"] == 8004


def test_settings_repeat_and_the_last_one_counts():
    options = parse("--set", "page_size=16", "--set", "mode=prefix", "--set", "page_size=32")
    assert options.settings == {"page_size": "32", "mode": "prefix"}


def test_a_setting_may_hold_an_equals_sign():
    assert parse("--set", "name=a=b").settings == {"name": "a=b"}


@pytest.mark.parametrize("assignment", ["page_size", "=16", ""])
def test_a_setting_without_name_or_value_is_refused(assignment):
    with pytest.raises(ServeError, match="key=value"):
        parse("--set", assignment)


def test_triton_arguments_keep_their_order():
    assert parse("--triton-arg=--a=1", "--triton-arg=--b").triton_args == ("--a=1", "--b")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--grpc-port", "0"),
        ("--http-port", "65536"),
        ("--metrics-port", "x"),
        ("--health-port", "-1"),
        ("--grace-s", "0"),
        ("--health-timeout-s", "nan"),
        ("--start-timeout-s", "soon"),
    ],
)
def test_a_number_out_of_its_range_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert arguments[0] in capsys.readouterr().err


def test_paths_do_not_depend_on_where_the_server_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = parse("--snapshot-dir", "saved", "--admin-socket", "admin.sock")
    assert options.snapshot_dir == str(tmp_path / "saved")
    assert options.admin_socket == tmp_path / "admin.sock"
    assert parse("--snapshot-dir", "s3://bucket/a//b").snapshot_dir == "s3://bucket/a//b"
    assert (parse().snapshot_dir, parse().admin_socket) == (None, None)


@pytest.mark.parametrize(
    ("setting", "option"),
    [("model_dir", "--model"), ("snapshot_dir", "--snapshot-dir"), ("admin_socket", "--admin-socket")],
)
def test_what_has_an_option_of_its_own_is_not_set(setting, option):
    with pytest.raises(ServeError, match=f"use {option}, not --set {setting}"):
        parse("--set", f"{setting}=x")


def test_the_log_format_is_one_of_three(capsys):
    assert [parse().log_format, parse("--log-format", "json").log_format] == ["auto", "json"]
    with pytest.raises(SystemExit):
        parse("--log-format", "xml")
    assert "--log-format" in capsys.readouterr().err
