"""The public names of the package: they are imported on first use, and a missing extra is named."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shotcast
from shotcast.collectives.communicator import Communicator
from shotcast.engine.async_llm import AsyncLLM
from shotcast.engine.llm import LLM
from shotcast.engine.sampling_params import SamplingParams
from shotcast.launcher.spawn import spawn

ROOT = Path(__file__).parent.parent


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT / "src")
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def without_packages(*names: str) -> str:
    """Code after which Python does not find these packages."""
    return f"""
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {names!r} else find_spec(name, package)
for name in {names!r}:
    sys.modules[name] = None
"""


def test_public_names_are_the_classes_of_their_modules() -> None:
    assert (shotcast.Communicator, shotcast.spawn) == (Communicator, spawn)
    assert (shotcast.LLM, shotcast.AsyncLLM, shotcast.SamplingParams) == (LLM, AsyncLLM, SamplingParams)


def test_every_public_name_exists() -> None:
    assert set(shotcast._LAZY) <= set(shotcast.__all__) <= set(dir(shotcast))
    for name in shotcast.__all__:
        assert getattr(shotcast, name) is not None


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sampler'"):
        shotcast.Sampler  # noqa: B018


def test_the_package_and_sampling_params_import_without_torch() -> None:
    code = "import sys; from shotcast import SamplingParams; print(SamplingParams().top_k, 'torch' in sys.modules)"
    assert run(code) == "0 False"


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM"])
def test_a_missing_extra_is_named(name: str) -> None:
    code = f"""{without_packages("transformers", "gguf")}
try:
    from shotcast import {name}
except ImportError as error:
    print(error)
from shotcast import Communicator, SamplingParams
"""
    assert run(code) == (
        f"shotcast.{name} needs packages that are not installed (gguf, transformers): pip install 'shotcast[engine]'"
    )


def test_the_packages_of_the_extra_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(requirement.partition(">=")[0] for requirement in extras["engine"]) == list(shotcast._ENGINE_EXTRA)
    assert all(importlib.util.find_spec(name) for name in shotcast._ENGINE_EXTRA)
