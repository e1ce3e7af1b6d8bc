"""Functions that ranks run for test_engine_nodes.py."""

from __future__ import annotations

from typing import Any

from shotcast.engine.llm import LLM


def member(model: str, options: dict[str, Any]) -> None:
    """Serve rank 0 until it ends."""
    LLM(model, **options)
    raise AssertionError("the constructor returned")
