"""What the chart makes of `snapshots`, rendered by the real helm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from microturn.settings import Settings
from support.chart import PRODUCTION, options_of, render, rendered, server_of

SAVED = ("--set", "snapshots.enabled=true")
BUCKET = (
    *SAVED,
    "--set",
    "snapshots.bucket.url=s3://sessions/eu,snapshots.bucket.endpoint=https://storage.example:9000,"
    "snapshots.bucket.region=eu-1,snapshots.bucket.credentialsSecretName=opens",
)
ENCRYPTED = ("--set", "snapshots.keySecretName=sealed")


def settings_of(*arguments: str) -> Settings:
    options = options_of(server_of(*arguments))
    return Settings.from_strings({**options.settings, "snapshot_dir": options.snapshot_dir or ""})


def volumes_of(server: dict[str, Any]) -> dict[str, Any]:
    return {volume["name"]: volume for volume in server["pod"]["volumes"]}


def claims_of(*arguments: str) -> list[str]:
    return [part["metadata"]["name"] for part in rendered(*arguments) if part["kind"] == "PersistentVolumeClaim"]


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ((*SAVED, "--set-json", "snapshots.everySeconds=2.5"), 2.5),
        (PRODUCTION, 10),
        (SAVED, 0),
        ((*BUCKET, "--set", "snapshots.everySeconds=60"), 60),
    ],
)
def test_live_sessions_are_saved_where_the_values_say_so(arguments: tuple[str, ...], seconds: float) -> None:
    assert settings_of(*arguments).snapshot_every_s == seconds


def test_a_directory_is_on_a_claim_that_replicas_share() -> None:
    assert settings_of(*SAVED).snapshot_dir == "/snapshots"
    assert claims_of(*SAVED) == ["check-microturn-snapshots"]
    assert volumes_of(server_of(*SAVED))["snapshots"]["persistentVolumeClaim"] == {
        "claimName": "check-microturn-snapshots"
    }
    assert claims_of(*SAVED, "--set", "snapshots.existingClaim=ours") == []


def test_a_bucket_takes_the_place_of_the_claim() -> None:
    server = server_of(*BUCKET)
    assert settings_of(*BUCKET).snapshot_dir == "s3://sessions/eu"
    assert claims_of(*BUCKET) == []
    assert "snapshots" not in volumes_of(server)
    assert not [mount for mount in server["volumeMounts"] if mount["name"].startswith("snapshot")]


def test_boto3_finds_the_bucket_in_its_environment() -> None:
    assert server_of(*BUCKET)["env"] == [
        {"name": "AWS_ENDPOINT_URL_S3", "value": "https://storage.example:9000"},
        {"name": "AWS_DEFAULT_REGION", "value": "eu-1"},
        {"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "opens", "key": "access-key-id"}}},
        {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "opens", "key": "secret-access-key"}}},
    ]


def test_without_a_secret_a_role_opens_the_bucket() -> None:
    role = (*SAVED, "--set", "snapshots.bucket.url=s3://sessions,server.serviceAccountName=saver")
    server = server_of(*role)
    assert server["pod"]["serviceAccountName"] == "saver"
    assert "env" not in server


@pytest.mark.parametrize("where", [SAVED, BUCKET])
def test_the_secret_can_be_read_by_the_server_alone(where: tuple[str, ...]) -> None:
    server = server_of(*where, *ENCRYPTED)
    assert volumes_of(server)["snapshot-key"]["secret"] == {
        "secretName": "sealed",
        "defaultMode": 0o440,
        "items": [{"key": "key", "path": "key"}],
    }
    (mount,) = [mount for mount in server["volumeMounts"] if mount["name"] == "snapshot-key"]
    assert mount["readOnly"] is True
    assert settings_of(*where, *ENCRYPTED).snapshot_key_file == f"{mount['mountPath']}/key"


def test_where_nothing_is_saved_there_is_none_of_it() -> None:
    unsaved = ("--set", "snapshots.enabled=false")
    assert "snapshot" not in json.dumps(server_of(*BUCKET, *ENCRYPTED, *unsaved))
    assert claims_of(*BUCKET, *unsaved) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("snapshots.bucket.url=https://sessions", "/snapshots/bucket/url"),
        ("snapshots.bucket.url=s3://", "/snapshots/bucket/url"),
        ("snapshots.bucket.endpoint=storage.example", "/snapshots/bucket/endpoint"),
        ("server.settings.snapshot_key_file=/key", "snapshot_key_file"),
    ],
)
def test_what_cannot_be_is_refused(value: str, said: str) -> None:
    refused = render(*SAVED, "--set", value)
    assert refused.returncode != 0
    assert said in refused.stderr
