"""The configuration of the server."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from shotcast.errors import ConfigError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The server's address, access and limits.

    Args:
        host: address or host name to listen on.
        port: port to listen on; 0 means any free one, which :func:`shotcast.server.main.run` reports once it listens.
        api_key: the key that clients send as ``Authorization: Bearer``; None admits everyone.
        public_metrics: serve ``/metrics`` without a key.
        served_model_name: the model name of the API; None means the engine's.
        max_queue: sequences (prompts times ``n``) that may wait and run; further requests are told to retry.
        max_prompt_tokens: maximum number of prompt tokens; None means the model's limit.
        max_output_tokens: maximum number of output tokens, which is also a request's default; None means the model's
            limit.
        max_body_bytes: maximum size of a request body in bytes.
        ping_s: seconds of silence after which a stream sends a comment; ``math.inf`` means never.
        allowed_origins: origins of web pages that browsers allow to use the server, such as ``https://example.org``;
            ``*`` for all.
        drain_s: seconds that running requests have to finish after the server is told to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    public_metrics: bool = False
    served_model_name: str | None = None
    max_queue: int = 256
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_body_bytes: int = 1 << 20
    ping_s: float = 15.0
    allowed_origins: tuple[str, ...] = ()
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be a number from 0 (any free one) to 65535, not {self.port!r}")
        for name in ("max_queue", "max_prompt_tokens", "max_output_tokens", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key must be printable ASCII, at least one character")
        if self.served_model_name == "":
            raise ConfigError("served_model_name must not be empty; leave it out for the engine's name")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins must be * or origins such as https://example.org, not {origin!r}")
        if not self.ping_s > 0:
            raise ConfigError(f"ping_s must be a number of seconds above 0, not {self.ping_s!r}")
        if not 0 <= self.drain_s < float("inf"):
            raise ConfigError(f"drain_s must be a number of seconds of at least 0, not {self.drain_s!r}")

    @property
    def loopback(self) -> bool:
        """Return whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
