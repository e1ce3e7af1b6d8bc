"""The public names of the package: they are imported on first use, and a missing extra is named."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import shotcast
from shotcast import RankFailed, extras
from shotcast.cli.doctor import _parts
from shotcast.collectives.communicator import Communicator
from shotcast.engine.async_llm import AsyncLLM
from shotcast.engine.llm import LLM
from shotcast.engine.sampling_params import SamplingParams
from shotcast.launcher.spawn import spawn

ROOT = Path(__file__).parent.parent


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT / "src")
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


def test_the_packages_of_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = {Requirement(text).name for text in project["dependencies"]}
    for extra, packages in extras.EXTRAS.items():
        asked = [Requirement(text) for text in project["optional-dependencies"][extra]]
        included = {other for one in asked if one.name == "shotcast" for other in one.extras}
        assert included == set(extras.INCLUDES.get(extra, ()))
        assert {one.name for one in asked} - always - {"shotcast"} == set(packages)
        assert all(importlib.util.find_spec(name) for name in packages)


def command(hidden: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line where one package is not installed."""
    code = f"""{without_packages(hidden)}
from shotcast.cli import main
if __name__ == "__main__":
    main()
"""
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("server", ("serve", "smollm2", "--device", "cpu", "--port", "0")),
        ("engine", ("generate", "smollm2", "x", "--device", "cpu", "-n", "1")),
        ("engine", ("bench", "engine", "--device", "cpu")),
        ("plots", ("plan", "llama-3.1-8b", "-g", "1", "--plot", "none.png")),
        ("plots", ("bench", "all-reduce", "--device", "cpu", "-g", "2", "--plot", "none.png")),
    ],
)
def test_a_command_says_which_extra_is_missing(extra: str, arguments: tuple[str, ...]) -> None:
    for package in extras.EXTRAS[extra]:
        if package in ("llguidance", "pydantic", "safetensors"):
            continue  # only grammars and folders of Hugging Face need two of these; without pydantic Typer fails first
        done = command(package, *arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        (line,) = done.stderr.splitlines()
        assert line.endswith(f"that is not installed ({package}): pip install 'shotcast[{extra}]'") or line.endswith(
            f"that are not installed ({package}): pip install 'shotcast[{extra}]'"
        )


@pytest.mark.full
def test_a_folder_of_weights_says_which_extra_is_missing(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **shape)).save_pretrained(tmp_path)
    done = command("safetensors", "generate", str(tmp_path), "x", "--device", "cpu")
    assert done.returncode == 2
    assert done.stderr.endswith("not installed (safetensors): pip install 'shotcast[engine]'\n")
    assert done.stderr.count("\n") == 1


def test_an_error_of_a_rank_names_the_extra() -> None:
    failed = RankFailed(1, "no such module")
    failed.__cause__ = ModuleNotFoundError("No module named 'ray.util'", name="ray.util")
    assert extras.explain(failed).endswith("(ray): pip install 'shotcast[ray]'")
    failed.__cause__ = ModuleNotFoundError("No module named 'mine'", name="mine")
    assert extras.explain(failed) == ""


@pytest.mark.full
@pytest.mark.parametrize("extra", ["engine", "server", "plots", "ray"])
def test_doctor_says_what_installs_an_extra(extra: str) -> None:
    package = extras.EXTRAS[extra][0]
    told = json.loads(command(package, "doctor", "--json").stdout)["extras"]
    assert told.pop(extra) == {"ready": False, "install": f"pip install 'shotcast[{extra}]'"}
    for other, state in told.items():
        ready = extra not in extras.INCLUDES.get(other, ())
        assert state == {"ready": ready, "install": "" if ready else f"pip install 'shotcast[{other}]'"}


def test_doctor_asks_for_triton_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "missing", lambda extra: ("triton",) if extra == "triton" else ())
    with_gpus, without = (_parts(SimpleNamespace(gpus=gpus)) for gpus in (["a GPU"], []))
    assert [part[0] for part in with_gpus] == list(extras.EXTRAS)
    assert with_gpus[-1][2] == "pip install 'shotcast[triton]'"
    assert without == with_gpus[:-1]


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(Path(shotcast.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path))
    assert len(found) > 500
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
