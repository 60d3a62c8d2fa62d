"""What the command lines of workers and edges refuse."""

from __future__ import annotations

import argparse

import pytest

from microturn.serve.dynamo_options import add_worker_arguments


def worker(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    return parser.parse_args(arguments)


def test_a_worker_has_a_name_by_itself() -> None:
    assert worker().name


@pytest.mark.parametrize("name", ["wörker", "a b", "x]y", "", "a" * 129])
def test_a_name_that_cannot_travel_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The worker was ready, and each stream that it took ended with INTERNAL, 'Invalid metadata'."""
    with pytest.raises(SystemExit):
        worker(f"--name={name}")
    assert "--name" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_that_is_none_for_others_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers on other machines were told to hand sessions over to 0.0.0.0, which is themselves."""
    with pytest.raises(SystemExit):
        worker(f"--host={host}")
    assert "reach this worker" in capsys.readouterr().err


def test_a_metrics_port_that_dynamo_cannot_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        worker("--metrics-port=40000")
    assert "32767" in capsys.readouterr().err


@pytest.mark.parametrize("urls", ["etcd:2379", "http://etcd", "http://etcd:2379,", "ftp://etcd:2379", ""])
def test_etcd_is_named_by_urls(urls: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Dynamo took anything, and said after two minutes that it had come too late."""
    with pytest.raises(SystemExit):
        worker(f"--etcd={urls}")
    assert "http://HOST:PORT" in capsys.readouterr().err


def test_etcd_may_have_several_urls() -> None:
    assert worker("--etcd=http://10.0.0.1:2379,https://etcd-2:2379").etcd == "http://10.0.0.1:2379,https://etcd-2:2379"
