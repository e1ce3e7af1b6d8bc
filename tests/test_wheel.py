"""The wheel that people install holds everything, and works away from the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, as setuptools leaves files beside the sources."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", target, source]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = target.glob("*.whl")
    return built


def test_holds_every_file_of_the_package(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "shotcast"
    expected = {
        f"shotcast/{file.relative_to(package).as_posix()}"
        for pattern in ("*.py", "py.typed", "collectives/choice/tables/*.json")
        for file in package.rglob(pattern)
    }
    assert "shotcast/py.typed" in expected
    assert expected - inside == set()
    assert {name.split("/")[0] for name in inside if ".dist-info/" not in name} == {"shotcast"}, "tests are packaged"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)


def test_holds_tuned_tables(wheel: Path) -> None:
    tables = [
        name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("shotcast/collectives/choice/tables/")
    ]
    assert any(name.endswith(".json") for name in tables)


def test_installs_elsewhere_and_runs_from_there(wheel: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel]
    result = subprocess.run(install, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    code = "import shotcast, shotcast.cli; print(shotcast.__file__); shotcast.Communicator, shotcast.spawn"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, cwd=tmp_path, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).is_relative_to(tmp_path / "site")
    version = subprocess.run(
        [sys.executable, "-m", "shotcast", "--version"],
        capture_output=True, text=True, timeout=500, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert version.returncode == 0, version.stderr
    assert version.stdout.startswith("shotcast ")
