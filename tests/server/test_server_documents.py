"""docs/reference/server.md lists everything there is, and so does the description that the server gives of itself."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import httpx
import jsonschema
from live_server import live
from scripted_engine import ScriptedEngine

from shotcast.server.config import ServerConfig
from shotcast.server.metrics import Metrics
from shotcast.server.request_body import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "server.md").read_text()


def test_parameters() -> None:
    bodies = CompletionBody, ChatBody, TokenizeBody, DetokenizeBody
    names = {name for body in bodies for name in body.model_fields}
    assert {name for name in names if f"`{name}`" not in TEXT} == set()


def test_configuration() -> None:
    assert {field.name for field in fields(ServerConfig) if f"`{field.name}`" not in TEXT} == set()


def test_metrics() -> None:
    lines = Metrics(ScriptedEngine()).text().decode().splitlines()
    names = {line.split()[2].removeprefix("shotcast_") for line in lines if line.startswith("# TYPE")}
    names = {name for name in names if not name.endswith("_created")}
    assert {name for name in names if f"`{name}`" not in TEXT and f"`{name}{{" not in TEXT} == set()
    assert len(names) == 18


def test_the_server_describes_its_paths_and_bodies() -> None:
    with live(api_key="secret") as server:
        described = httpx.get(f"{server.url}/openapi.json").json()
        assert "/openapi.json" in httpx.get(f"{server.url}/docs").text
    paths = {path for path in described["paths"] if f"{path.replace('{name}', '{id}')}`" not in TEXT}
    assert paths == set()
    assert len(described["paths"]) == 9
    for path, body in (("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)):
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(described["components"]["schemas"][body.__name__]["properties"]) == set(body.model_fields)
        validator = jsonschema.Draft202012Validator(schema | {"components": described["components"]})
        request = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        request.pop("messages" if body is CompletionBody else "prompt")
        assert validator.is_valid(request)
        assert not validator.is_valid(request | {"max_tokens": "many"})
        assert not validator.is_valid(request | {"unknown": 1})
