"""Access control of the gateway: by bearer token, by client secret, and by the page that asks.

token      all of the API and the metrics; of a program's server
metrics    a token of Prometheus' own, for the metrics only
secret     realtime sessions only; of a browser, as a WebSocket subprotocol
origin     a browser says which page asks: our own, or one that was allowed
host       without a token only loopback names, so that no page can rebind its own name to this machine
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from microturn_gateway.client_events import UpdateSession
from microturn_gateway.client_secrets import PREFIX, ClientSecrets
from microturn_gateway.failures import Refusal

SUBPROTOCOL = "realtime"
_SECRET_SUBPROTOCOL = "openai-insecure-api-key."
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class Access:
    """The rules of one gateway.

    Args:
        token: None opens it to every program of this machine.
        allowed_origins: of pages besides our own, such as `https://app.example`.
        client_secrets: what browsers come with.
        metrics_token: what the metrics want, where they do not get the token.
    """

    def __init__(
        self,
        token: str | None,
        allowed_origins: Sequence[str],
        client_secrets: ClientSecrets,
        metrics_token: str | None = None,
    ) -> None:
        self._token = token
        self._metrics_token = metrics_token
        self._allowed_origins = allowed_origins
        self._client_secrets = client_secrets

    def check_place(self, headers: Mapping[str, str]) -> None:
        """Checks where a request comes from and goes to.

        Args:
            headers: by lower-case name.

        Raises:
            Refusal: from a page that is not allowed, or to a name that is not this machine's.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._token is None and _name(host) not in _LOOPBACK_NAMES:
            raise Refusal("host_not_allowed", "without a token this gateway serves loopback only", http_status=403)
        if origin is not None and origin not in self._allowed_origins and origin.partition("://")[2] != host:
            raise Refusal("origin_not_allowed", f"pages of '{origin}' are not allowed here", http_status=403)

    def check_token(self, headers: Mapping[str, str], subprotocols: Sequence[str] = ()) -> None:
        """Checks the token, sent as a header or, to a WebSocket, as a subprotocol.

        Raises:
            Refusal: it is missing or wrong.
        """
        if self._token is not None and not _is_same(_offered(subprotocols) or _bearer(headers), self._token):
            raise Refusal("invalid_api_key", "send the gateway's token as 'Authorization: Bearer …'", http_status=401)

    def check_metrics(self, headers: Mapping[str, str]) -> None:
        """Checks the token or that of the metrics.

        Raises:
            Refusal: both are missing or wrong.
        """
        if self._metrics_token is None or not _is_same(_bearer(headers), self._metrics_token):
            self.check_token(headers)

    def check_realtime(self, headers: Mapping[str, str], subprotocols: Sequence[str]) -> UpdateSession | None:
        """Checks the token or a secret, sent as a header or as a subprotocol.

        Returns:
            How the session begins, where a secret says so.

        Raises:
            Refusal: both are missing or wrong.
        """
        key = _offered(subprotocols) or _bearer(headers)
        if key.startswith(PREFIX):
            session = self._client_secrets.session(key)
            if session is None:
                raise Refusal("invalid_client_secret", "this client secret is not valid: get another", http_status=401)
            return session
        if self._token is not None and not _is_same(key, self._token):
            raise Refusal("invalid_api_key", "come with the token or a client secret", http_status=401)
        return None


def caller_of(headers: Mapping[str, str], subprotocols: Sequence[str] = ()) -> bytes:
    """Who asks, as far as a bearer token tells callers apart; the token cannot be read from it."""
    return hashlib.sha256((_offered(subprotocols) or _bearer(headers)).encode()).digest()


def _offered(subprotocols: Sequence[str]) -> str:
    """The token or the secret that a browser brings in place of a header; empty where it brings none."""
    names = [name for name in subprotocols if name != SUBPROTOCOL]
    return names[0].removeprefix(_SECRET_SUBPROTOCOL) if names else ""


def _name(host: str) -> str | None:
    """The name in a host header, without its port; None where it is no such header."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _is_same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
