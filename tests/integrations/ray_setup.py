"""The setup hook of Ray's processes in tests."""

from __future__ import annotations

from shotcast.integrations.ray import register


def known() -> None:
    register(timeout_s=30.0)
