from __future__ import annotations

import pytest

from shotcast.errors import ConfigError
from shotcast.server.config import ServerConfig


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"max_queue": 0}, "max_queue"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": "schlüssel"}, "api_key"),
        ({"api_key": "two\nlines"}, "api_key"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"ping_s": 0}, "ping_s"),
        ({"allowed_origins": ("example.org",)}, "allowed_origins"),
        ({"allowed_origins": ("https://example.org/",)}, "allowed_origins"),
        ({"ping_s": float("nan")}, "ping_s"),
        ({"drain_s": -1}, "drain_s"),
        ({"drain_s": float("nan")}, "drain_s"),
        ({"drain_s": float("inf")}, "drain_s"),
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        ServerConfig(**wrong)
    if wrong.get("api_key"):
        assert str(wrong["api_key"]) not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "", "10.0.0.1", "gpu7.example.org")),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert ServerConfig(host=host).loopback == loopback


def test_the_key_is_not_shown() -> None:
    shown = repr(ServerConfig(api_key="s3cret"))
    assert "s3cret" not in shown
    assert "host='127.0.0.1'" in shown
