"""Every piece of Python that a document shows runs, or compiles where it needs more than a test has; YAML is read."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, Fence, fences
from snippet_targets import run_with_comm

import entry_points
from shotcast.hardware import cluster
from shotcast.launcher.spawn import spawn

CODE = fences("python")
SCRIPTS = [fence for fence in CODE if fence.mark == ""]
RANKS = [fence for fence in CODE if fence.mark == "ranks"]
PRINTED = {"shotcast.spawn(work, 4)": "[[6.0, 6.0, 6.0, 6.0], [6.0, 6.0, 6.0, 6.0], "}
"""The beginning of what a script prints, by a part of the script."""


@pytest.mark.parametrize("fence", CODE, ids=lambda fence: fence.where)
def test_it_is_python(fence: Fence) -> None:
    ast.parse(fence.body)


@pytest.mark.every(6)
@pytest.mark.parametrize(
    "fence",
    [
        pytest.param(
            fence,
            marks=[pytest.mark.full] if fence.page.name in ("engine.md", "ray.md") or "LLM(" in fence.body else [],
            id=fence.where,
        )
        for fence in SCRIPTS
    ],
)
def test_scripts_run(fence: Fence, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(fence.body)
    environment = entry_points.environment(tmp_path)
    if fence.page.is_relative_to(ROOT / "research"):
        environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'research'}"
    command = [sys.executable, script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    for part, printed in PRINTED.items():
        if part in fence.body:
            assert result.stdout.startswith(printed), result.stdout
    assert result.stdout.strip()


def test_parts_run_on_ranks() -> None:
    """The parts run in the order of the pages, on one communicator."""
    assert RANKS
    printed = spawn(run_with_comm, 2, [(fence.where, fence.body) for fence in RANKS], timeout_s=250)
    assert "one_shot" in printed[0]


@pytest.mark.parametrize("fence", fences("yaml"), ids=lambda fence: fence.where)
def test_descriptions_of_clusters_are_read(fence: Fence) -> None:
    assert cluster.parse(fence.body, fence.where).network is not None
