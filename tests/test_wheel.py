"""The wheel that people install holds everything, and works away from the repository."""

from __future__ import annotations

import configparser
import json
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
        for pattern in ("*.py", "py.typed", "choice/tables/*.json", "clusters/*.yaml", "calibrations/*.json")
        for file in package.rglob(pattern)
    }
    assert "shotcast/py.typed" in expected
    assert expected - inside == set()
    assert {name.split("/")[0] for name in inside if ".dist-info/" not in name} == {"shotcast"}, "tests are packaged"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)


def test_tells_other_programs_of_their_entry_points(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(archive.read(name).decode())
    groups = {"console_scripts", "torch.backends", "vllm.platform_plugins", "sglang.srt.plugins"}
    assert {group for group in points.sections() if "shotcast" in points[group]} == groups


def test_holds_tuned_tables(wheel: Path) -> None:
    tables = [
        name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("shotcast/collectives/choice/tables/")
    ]
    assert any(name.endswith(".json") for name in tables)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder of its own."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel]
    result = subprocess.run(install, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    return site


@pytest.mark.full
def test_runs_from_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import shotcast, shotcast.cli; print(shotcast.__file__); shotcast.Communicator, shotcast.spawn"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, cwd=tmp_path, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).is_relative_to(installed)
    version = subprocess.run(
        [sys.executable, "-m", "shotcast", "--version"],
        capture_output=True, text=True, timeout=500, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert version.returncode == 0, version.stderr
    assert version.stdout.startswith("shotcast ")


SCRIPT = """
import pathlib

import torch
import torch.distributed as dist

dist.init_process_group("shotcast")
x = torch.full([4], dist.get_rank() + 1.0)
dist.all_reduce(x)
pathlib.Path(f"rank_{dist.get_rank()}.txt").write_text(str(x.tolist()))
dist.destroy_process_group()
"""
"""An ordinary program of PyTorch, in which one word is another."""


@pytest.mark.full
def test_pytorch_finds_the_backend_by_the_entry_point_alone(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    result = subprocess.run(run, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    # a file each: lines of several processes on one pipe can run into each other
    results = [(tmp_path / f"rank_{rank}.txt").read_text() for rank in range(2)]
    assert results == ["[3.0, 3.0, 3.0, 3.0]"] * 2
    doctor = [sys.executable, "-m", "shotcast", "doctor", "--json"]
    told = subprocess.run(doctor, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    states = {one["name"]: one for one in json.loads(told.stdout)["integrations"]}
    assert states["torch.distributed"]["active"], states
    for name in ("vLLM", "SGLang"):
        assert states[name]["unsupported_reason"] == f"SHOTCAST_{name.upper()} is not 1"


@pytest.mark.full
@pytest.mark.timing
def test_imports_in_an_instant(installed: Path, tmp_path: Path) -> None:
    """The package, the module that PyTorch imports at ``import torch``, and the plug-ins of vLLM and SGLang."""
    modules = "shotcast, shotcast.process_group.registration, shotcast.integrations.vllm, shotcast.integrations.sglang"
    code = f"import time; start = time.perf_counter(); import {modules}; print(time.perf_counter() - start)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def seconds() -> float:
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment).stdout)

    assert min(seconds() for _ in range(4)) < 0.3
