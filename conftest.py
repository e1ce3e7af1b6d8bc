"""Fixtures and hooks of all tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
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


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases to ``make test-full`` where ``every`` says so, and put files marked ``long`` first.

    A worker that began a long file last would keep the others waiting.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if every := item.get_closest_marker("every"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % every.args[0]:
                item.add_marker("full")
            seen[test] += 1
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
