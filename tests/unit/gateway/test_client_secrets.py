"""Client secrets are signed: good at every replica with the key, and nothing of them can be changed."""

from __future__ import annotations

import base64
import json
import struct
import zlib

import pytest

from microturn_gateway.client_events import parse_session
from microturn_gateway.client_secrets import PREFIX, ClientSecrets, signing_key
from microturn_gateway.failures import Refusal
from support.clock import Clock

TOKEN = "a-token-of-some-length"
SESSION = {
    "instructions": "Sprich Deutsch, bitte: \U0001f33b",
    "max_output_tokens": 5,
    "tools": [{"type": "function", "name": "water", "parameters": {"type": "object", "properties": {}}}],
    "microturn": {"temperature": 0.5},
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replica(clock: Clock) -> ClientSecrets:
    return ClientSecrets(signing_key(TOKEN), clock)


def payload_of(secret: str) -> bytes:
    return base64.urlsafe_b64decode(secret.removeprefix(PREFIX) + "===")


def spelled(payload: bytes) -> str:
    return PREFIX + base64.urlsafe_b64encode(payload).decode().rstrip("=")


def test_a_secret_of_one_replica_is_good_at_another(replica: ClientSecrets, clock: Clock) -> None:
    """Each process remembered its own, so that of two behind a proxy one refused what the other had made."""
    secret = ClientSecrets(signing_key(TOKEN), clock).create(60, SESSION)
    assert replica.session(secret.value) == parse_session(SESSION)
    assert secret.expires_at_s == 1060


def test_many_are_good_at_once(replica: ClientSecrets) -> None:
    """Beyond 4,096 the oldest was forgotten."""
    first = replica.create(60, {}).value
    for _ in range(5000):
        replica.create(60, {})
    assert replica.session(first) == parse_session({})


@pytest.mark.parametrize("other", [signing_key("another-token-as-long"), signing_key(None)], ids=["derived", "drawn"])
def test_a_secret_of_another_key_is_none(replica: ClientSecrets, clock: Clock, other: bytes) -> None:
    assert replica.session(ClientSecrets(other, clock).create(60, SESSION).value) is None


def test_without_a_source_each_process_has_a_key_of_its_own() -> None:
    assert signing_key(None) != signing_key(None)
    assert signing_key(TOKEN) == signing_key(TOKEN) != signing_key(None)


def test_no_bit_of_it_can_be_changed(replica: ClientSecrets) -> None:
    payload = payload_of(replica.create(60, SESSION).value)
    for position in range(8 * len(payload)):
        changed = bytearray(payload)
        changed[position // 8] ^= 1 << position % 8
        assert replica.session(spelled(bytes(changed))) is None, position


def test_neither_its_expiry_nor_its_session_can_be_chosen(replica: ClientSecrets, clock: Clock) -> None:
    payload = payload_of(replica.create(60, SESSION).value)
    digest, expiry, session = payload[:32], payload[32:40], payload[40:]
    later, freer = struct.pack(">Q", 2**40), zlib.compress(json.dumps({}).encode())
    for forged in (digest + later + session, digest + expiry + freer, expiry + session, digest, b""):
        assert replica.session(spelled(forged)) is None
    clock.now_s = 1059
    assert replica.session(spelled(payload)) is not None
    clock.now_s = 1060
    assert replica.session(spelled(payload)) is None


@pytest.mark.parametrize("spelling", ["{}=", "{}A", "{} ", "{}\n", "*{}", "{}é"])
def test_it_is_spelled_in_one_way(replica: ClientSecrets, spelling: str) -> None:
    """Base64 is read with what does not belong there, and with any bits behind its end."""
    secret = replica.create(60, SESSION).value
    assert replica.session(spelling.format(secret)) is None
    assert replica.session(PREFIX + spelling.format(secret.removeprefix(PREFIX))) is None
    assert replica.session(secret.removeprefix(PREFIX)) is None
    for last in "AQgw0":
        changed = secret[:-1] + last
        assert (replica.session(changed) is None) == (changed != secret)


def test_what_does_not_fit_a_header_is_refused(replica: ClientSecrets) -> None:
    incompressible = base64.b85encode(b"".join(signing_key(None) for _ in range(300))).decode()
    with pytest.raises(Refusal, match=r"session\.update") as refused:
        replica.create(60, {"instructions": incompressible})
    assert (refused.value.code, refused.value.param, refused.value.http_status) == ("too_large", "session", 413)
    whole = replica.create(60, {"instructions": incompressible[:3000]}).value
    assert replica.session(whole) == parse_session({"instructions": incompressible[:3000]})


def test_what_another_version_knows_and_this_one_does_not_is_not_left_out(replica: ClientSecrets) -> None:
    assert replica.session(replica.create(60, {"voice": "ash"}).value) is None
