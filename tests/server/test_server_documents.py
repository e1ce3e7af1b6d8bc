"""docs/reference/server.md lists everything there is."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

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
