"""Fixtures and hooks of all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Tests share few cores: how long an example takes says nothing about the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files marked ``long`` first: a worker that began one of them last would keep the others waiting."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
