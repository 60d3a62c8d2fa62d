"""How a gateway runs: one frozen value, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from microturn_gateway.server_access import ServerAccess

_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class GatewaySettings:
    """The settings of one gateway.

    Attributes:
        server: `host:port` of the Microturn server's gRPC endpoint, or of an edge before several.
        server_access: what it takes to be let in there.
        host: to listen on.
        port: to listen on; 0 takes a free one.
        token: what clients must come with; None lets every program of this machine in.
        metrics_token: opens `/metrics` and nothing else, as the token does.
        secret_key: signs client secrets, the same in all replicas; None takes the token, and without one a random key.
        allowed_origins: of pages besides our own.
        served_model_names: what clients may call the model besides what the server calls it.
        beat_ms: least time between two micro-turns of a session, milliseconds.
        max_sessions: realtime sessions at once, and as many kept ones of chats and responses.
        idle_timeout_s: silence of a client after which its session ends, seconds.
        max_answer_tokens: longest answer where the client does not say.
        max_message_bytes: of one event.
        max_body_bytes: of one HTTP request.
        send_timeout_s: how long a client may take nothing before it is given up, seconds.

    Raises:
        ValueError: others could reach it without a token, or a number is out of range.
    """

    server: str = "localhost:8001"
    server_access: ServerAccess = field(default_factory=ServerAccess)
    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    metrics_token: str | None = None
    secret_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    beat_ms: float = 200.0
    max_sessions: int = 64
    idle_timeout_s: float = 900.0
    max_answer_tokens: int = 1024
    max_message_bytes: int = 262_144
    max_body_bytes: int = 4_194_304
    send_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if self.token is None and self.host not in _LOOPBACK_HOSTS:
            raise ValueError(f"'{self.host}' can be reached from outside: give a token (--token-file)")
        if any(token is not None and len(token) < 16 for token in (self.token, self.metrics_token)):
            raise ValueError("a token has 16 characters or more")
        if self.secret_key is not None and len(self.secret_key) < 32:
            raise ValueError("a key for client secrets has 32 characters or more")
        if not all(name.strip() for name in self.served_model_names):
            raise ValueError("a model's name is not empty (--served-model-name)")
        for name in ("max_sessions", "idle_timeout_s", "max_answer_tokens", "send_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
        if self.beat_ms < 0:
            raise ValueError("beat_ms must be 0 or more")
