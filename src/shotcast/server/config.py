"""How the server listens, and what it admits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields

from shotcast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to serve, to whom, and how much.

    Args:
        host: address or name to listen on.
        port: 0 for any free one, which :func:`shotcast.server.main.run` tells when it listens.
        api_key: what clients send as ``Authorization: Bearer``; None lets everybody in.
        public_metrics: ``/metrics`` needs no key.
        served_model_name: the name that clients ask for; None for the engine's.
        max_queue: sequences (prompts times ``n``) that wait and run; whoever comes beyond is told to come back.
        max_prompt_tokens: the longest prompt; None for what the model takes.
        max_output_tokens: no output is longer, whatever is asked, and this is what one gets who asks for nothing; None
            for what the model takes.
        max_body_bytes: of a request.
        drain_s: seconds that running requests have to end once the server is told to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    public_metrics: bool = False
    served_model_name: str | None = None
    max_queue: int = 256
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_body_bytes: int = 1 << 20
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is a number from 0 (any free one) to 65535, not {self.port!r}")
        for name in ("max_queue", "max_prompt_tokens", "max_output_tokens", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is a whole number from 1 up, not {value!r}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key is printable ASCII, at least one character")
        if self.served_model_name == "":
            raise ConfigError("served_model_name is empty; leave it out for the engine's name")
        if not 0 <= self.drain_s < float("inf"):
            raise ConfigError(f"drain_s is a number of seconds from 0 up, not {self.drain_s!r}")

    def __repr__(self) -> str:
        shown = (field.name for field in fields(self) if field.name != "api_key")
        return f"ServerConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def loopback(self) -> bool:
        """Only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
