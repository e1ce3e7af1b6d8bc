"""Every change by which a test refutes a kernel still applies: its line is in the kernel's source, exactly once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from . import (
    kernel_traces,
    test_fault_traces,
    test_in_place_traces,
    test_kernel_changes,
    test_node_traces,
    test_uneven_traces,
    test_window_traces,
)

TABLES: tuple[dict[str, Any], ...] = (
    test_fault_traces.CHANGES,
    test_in_place_traces.CHANGES,
    test_kernel_changes.CASES,
    test_node_traces.CASES,
    test_uneven_traces.CHANGES,
    test_window_traces.CHANGES,
)


def changes() -> Iterator[Any]:
    for name, case in (item for table in TABLES for item in table.items()):
        found = [case, *case] if isinstance(case, tuple) else [case]
        for change in found:
            if hasattr(change, "old"):
                yield pytest.param(change.module, change.old, id=name)


@pytest.mark.parametrize(("module", "old"), list(changes()))
def test_a_change_applies(module: str, old: str) -> None:
    found = importlib.util.find_spec(f"{kernel_traces.PACKAGE}.{module}")
    assert found is not None
    assert found.loader is not None
    source = found.loader.get_source(found.name)  # type: ignore[attr-defined]
    assert source.count(old) == 1
