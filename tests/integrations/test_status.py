"""The states of integrations, in an environment that has them, and without each thing that they need."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shotcast.integrations import status
from shotcast.integrations.status import Integration, integrations


def state(name: str) -> Integration:
    (found,) = [one for one in integrations() if one.name == name]
    assert found.active == (found.unsupported_reason == "")
    assert found.use
    return found


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Replace what is installed: entry points by group, folders of packages by name, and what is imported."""
    made = SimpleNamespace(points={"torch.backends": ["shotcast"]}, folders={}, imported={}, version="2.60.0")
    for name in ("torch", "ray"):
        made.folders[name] = tmp_path / name
        made.folders[name].mkdir()
    collective = tmp_path / "ray" / "util" / "collective"
    (collective / "collective_group").mkdir(parents=True)
    (tmp_path / "ray" / "experimental").mkdir()
    (collective / "backend_registry.py").write_text("def register_collective_backend(name, group_cls): ...")
    (collective / "collective_group" / "base_collective_group.py").write_text(
        "class BaseGroup:\n    def __init__(self, world_size, rank, group_name): ..."
    )
    (tmp_path / "ray" / "experimental" / "internal_kv.py").write_text(
        "\n".join(f"def _internal_kv_{name}(): ..." for name in ("put", "get", "del"))
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: made.version)

    def find_spec(name: str) -> ModuleSpec | None:
        if name not in made.folders:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(made.folders[name])]
        return spec

    points = lambda group: [SimpleNamespace(name=name) for name in made.points.get(group, [])]  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "entry_points", points)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(status, "sys", SimpleNamespace(modules=made.imported))
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    return made


def imported(backends: list[str], available: bool = True) -> Any:
    return SimpleNamespace(is_available=lambda: available, Backend=SimpleNamespace(backend_list=backends))


def test_everything_is_there(environment: SimpleNamespace) -> None:
    assert all(one.active for one in integrations() if one.name in ("torch.distributed", "Ray"))
    environment.imported["torch.distributed"] = imported(["gloo", "shotcast"])
    assert state("torch.distributed").active


@pytest.mark.parametrize(
    ("module", "why"),
    [(imported(["gloo"]), "imported without loading it"), (imported([], available=False), "built without")],
)
def test_pytorch_was_imported_and_does_not_have_the_backend(
    environment: SimpleNamespace, module: Any, why: str
) -> None:
    environment.imported["torch.distributed"] = module
    assert why in state("torch.distributed").unsupported_reason


def test_pytorch_that_is_not_told(environment: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1" in state("torch.distributed").unsupported_reason
    environment.points.clear()
    assert state("torch.distributed").unsupported_reason == (
        "this installation has no entry point in torch.backends: install shotcast again"
    )


def test_programs_that_are_not_installed(environment: SimpleNamespace) -> None:
    environment.folders.clear()
    assert state("torch.distributed").unsupported_reason == "PyTorch is not installed"
    assert state("Ray").unsupported_reason == "Ray is not installed"


def test_an_old_ray(environment: SimpleNamespace) -> None:
    environment.version = "2.40.0"
    assert state("Ray").unsupported_reason == "Ray 2.40.0 is not served; from 2.60 to below 3 is"
    environment.version = "2.61.0"
    (environment.folders["ray"] / "util" / "collective" / "backend_registry.py").unlink()
    assert (
        "Ray 2.61.0 is not as expected: the source of ray.util.collective.backend_registry"
        in state("Ray").unsupported_reason
    )


def test_plug_ins_are_asked_after_their_entry_points(
    environment: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, group in (("vLLM", "vllm.platform_plugins"), ("SGLang", "sglang.srt.plugins")):
        monkeypatch.delenv(f"SHOTCAST_{name.upper()}", raising=False)
        assert f"no entry point in {group}" in state(name).unsupported_reason
        environment.points[group] = ["shotcast"]
        assert state(name).unsupported_reason == f"{name} is not installed"
        environment.folders[name.lower()] = environment.folders["torch"]
        assert state(name).unsupported_reason == f"SHOTCAST_{name.upper()} is not 1"


def test_no_program_is_imported() -> None:
    code = (
        "import sys; from shotcast.integrations.status import integrations; integrations(); "
        "print([name for name in ('torch', 'ray', 'vllm', 'sglang', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout == "[]\n", result.stderr


def test_as_json() -> None:
    assert Integration("A", "use()", "why").as_json() == {
        "name": "A", "use": "use()", "unsupported_reason": "why", "active": False,
    }  # fmt: skip
