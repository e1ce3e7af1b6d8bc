"""Fixtures and hooks of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# What commands print is compared as a pipe gets it: a shell or a CI may ask for colors, or another width.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "GITHUB_ACTIONS"):
    os.environ.pop(_name, None)
# Servers of tests are on this machine, whatever proxy its user has.
for _name in ("NO_PROXY", "no_proxy"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "127.0.0.1", "localhost")))

# Tests share few cores: how long an example takes says nothing about the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files marked ``long`` first: a worker that began one of them last would keep the others waiting."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep modules and tests, a million objects, out of garbage collections: now and while the tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()
