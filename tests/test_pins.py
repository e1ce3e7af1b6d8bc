"""The linters that run before a commit are those that `make test` runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("package", "hooks"), [("ruff", "ruff-pre-commit"), ("mypy", "mirrors-mypy")])
def test_commit_hooks_use_the_pinned_version(package: str, hooks: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = [
        r.split("==")[1] for r in project["project"]["optional-dependencies"]["dev"] if r.startswith(f"{package}==")
    ]
    revisions = re.findall(rf"/{hooks}\n\s+rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(pins) == 1, f"{package} is not pinned once"
    assert revisions == pins
