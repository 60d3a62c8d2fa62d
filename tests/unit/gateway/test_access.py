"""Who is let in: by token, by client secret, from which pages and to which names."""

from __future__ import annotations

import pytest

from microturn_gateway.access import Access
from microturn_gateway.client_events import AnswerOptions, UpdateSession
from microturn_gateway.client_secrets import ClientSecrets, signing_key
from microturn_gateway.failures import Refusal
from support.clock import Clock

TOKEN = "a-token-of-some-length"
SESSION = {"instructions": "Be brief.", "max_output_tokens": 5}
BEGINNING = UpdateSession("Be brief.", AnswerOptions(5, {}))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client_secrets(clock: Clock) -> ClientSecrets:
    return ClientSecrets(signing_key(TOKEN), clock)


@pytest.fixture
def access(client_secrets: ClientSecrets) -> Access:
    return Access(TOKEN, ["https://app.example"], client_secrets)


def test_the_token_opens_everything(access: Access) -> None:
    access.check_token({"authorization": f"Bearer {TOKEN}"})
    assert access.check_realtime({"authorization": f"bearer {TOKEN}"}, ()) is None


@pytest.mark.parametrize("said", ["", TOKEN, "Bearer", "Bearer nothing", f"Basic {TOKEN}", "Bearer ü"])
def test_nothing_else_does(access: Access, said: str) -> None:
    for check in (access.check_token, lambda headers: access.check_realtime(headers, ())):
        with pytest.raises(Refusal) as refused:
            check({"authorization": said})
        assert (refused.value.code, refused.value.http_status) == ("invalid_api_key", 401)


def test_a_secret_opens_sessions_as_header_or_subprotocol_until_it_expires(
    access: Access, client_secrets: ClientSecrets, clock: Clock
) -> None:
    secret = client_secrets.create(60, SESSION)
    assert secret.expires_at_s == 1060
    offered = ["realtime", f"openai-insecure-api-key.{secret.value}"]
    assert access.check_realtime({}, offered) == BEGINNING
    assert access.check_realtime({"authorization": f"Bearer {secret.value}"}, ["realtime"]) == BEGINNING
    with pytest.raises(Refusal, match="token"):
        access.check_token({"authorization": f"Bearer {secret.value}"})
    clock.now_s = 1060
    with pytest.raises(Refusal) as refused:
        access.check_realtime({}, offered)
    assert refused.value.code == "invalid_client_secret"


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        (None, True),
        ("http://gateway.example:8080", True),
        ("https://app.example", True),
        ("https://app.example.evil", False),
        ("http://gateway.example", False),
        ("null", False),
        ("http://evil.example", False),
    ],
)
def test_pages_of_others_are_refused(access: Access, origin: str | None, is_allowed: bool) -> None:
    headers = {"host": "gateway.example:8080", **({} if origin is None else {"origin": origin})}
    if is_allowed:
        access.check_place(headers)
        return
    with pytest.raises(Refusal) as refused:
        access.check_place(headers)
    assert (refused.value.code, refused.value.http_status) == ("origin_not_allowed", 403)


@pytest.mark.parametrize("host", ["evil.example:8080", "", "localhost.evil", "[", "evil.example@localhost.evil"])
def test_without_a_token_no_page_can_rebind_its_name_to_us(client_secrets: ClientSecrets, host: str) -> None:
    access = Access(None, (), client_secrets)
    access.check_token({})
    access.check_place({"host": "localhost:8080"})
    access.check_place({"host": "[::1]:8080"})
    with pytest.raises(Refusal) as refused:
        access.check_place({"host": host, "origin": f"http://{host}"})
    assert refused.value.code == "host_not_allowed"
