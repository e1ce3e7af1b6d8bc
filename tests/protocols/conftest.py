"""The fixtures ``verify`` and ``refute``: a protocol holds, or violates a given property."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .explore import Kind, Model, Result, explore

_EXPLORED = pytest.StashKey[list[tuple[str, Result]]]()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[[Model], Result]:
    """Explore a model, and keep the counts for the summary that ``pytest -v`` prints."""

    def explored(model: Model) -> Result:
        result = explore(model)
        request.config.stash.setdefault(_EXPLORED, []).append((request.node.nodeid.rpartition("/")[2], result))
        return result

    return explored


@pytest.fixture
def verify(run: Callable[[Model], Result]) -> Callable[[Model], Result]:
    def verified(model: Model) -> Result:
        result = run(model)
        assert result.violation is None, str(result.violation)
        return result

    return verified


@pytest.fixture
def refute(run: Callable[[Model], Result]) -> Callable[..., Result]:
    def refuted(model: Model, *kinds: Kind) -> Result:
        result = run(model)
        assert result.violation is not None, f"nothing wrong in {result.states} states, expected {kinds}"
        assert result.violation.kind in kinds, str(result.violation)
        return result

    return refuted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.get_verbosity() < 1:
        return
    terminalreporter.section("states explored")
    for name, result in config.stash.get(_EXPLORED, []):
        found = result.violation.kind.name if result.violation else "holds"
        terminalreporter.write_line(f"{result.states:8} states {result.steps:8} steps  {found:12} {name}")
