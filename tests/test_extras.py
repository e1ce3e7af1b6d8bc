"""Each extra alone is all that its commands need: the wheel in a virtual environment that has nothing else.

An environment is empty but for links to the distributions that the wheel's metadata asks for, found where the tests
run; pip then installs the wheel with the extra, and would fail if anything were missing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from test_wheel import ROOT, wheel  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.full, pytest.mark.timing]

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def requirements(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """The requirements of an installed distribution with extras, on this machine."""
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield requirement


def closure(asked: list[Requirement]) -> set[str]:
    """The names of all distributions that requirements ask for, themselves and by others."""
    found: dict[str, frozenset[str]] = {}
    while asked:
        requirement = asked.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name == "shotcast":  # an extra that has another
            asked += [Requirement(text) for extra in extras for text in EXTRAS[extra]]
        elif name not in found or not extras <= found[name]:
            found[name] = found.get(name, frozenset()) | extras
            asked += requirements(name, found[name])
    return set(found)


def link(name: str, site: Path) -> None:
    """Link the files of a distribution, folders of its own as a whole."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
        source = Path(str(distribution.locate_file(top)))
        if source.exists() and not (site / top).exists():
            (site / top).symlink_to(source)


class Installed:
    """A virtual environment with the wheel and one extra."""

    def __init__(self, folder: Path, built: Path, extra: str):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        (site,) = folder.glob("lib/python*/site-packages")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        names = closure([Requirement(text) for text in (*project["dependencies"], *EXTRAS.get(extra, ()))])
        for name in sorted(names):
            link(name, site)
        target = f"{built}[{extra}]" if extra else str(built)
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-index", target]
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        offline = plain | {"PIP_CONFIG_FILE": os.devnull}
        done = subprocess.run(pip, capture_output=True, text=True, timeout=300, env=offline)
        assert done.returncode == 0, f"the links lack something that the metadata asks for:\n{done.stderr}"
        self.folder, self.names = folder, names

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SHOTCAST"))}
        return kept | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}

    def run(self, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command, env = [self.python, *map(str, arguments)], self.environment() | variables
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=self.folder, env=env)

    def shotcast(self, *arguments: object) -> str:
        """Return what a command prints that succeeds."""
        done = self.run("-m", "shotcast", *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def refused(self, *arguments: object) -> str:
        """Return the one line of a command that is refused."""
        done = self.run("-m", "shotcast", *arguments)
        assert done.returncode == 2, (done.stdout, done.stderr[-3000:])
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        return done.stderr.strip()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {"<s>": 0, "</s>": 1, "[UNK]": 2, **{chr(97 + i): 3 + i for i in range(26)}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Callable[[str], Installed]:  # noqa: F811
    def install(extra: str) -> Installed:
        return Installed(tmp_path_factory.mktemp(extra or "none"), wheel, extra)

    return install


BENCH = ("bench", "all-reduce", "--device", "cpu", "-g", "2", "-b", "64", "-e", "64", "--seconds", "0.01")


def readiness(environment: Installed) -> dict[str, bool]:
    extras = json.loads(environment.shotcast("doctor", "--json"))["extras"]
    assert all(one["ready"] or one["install"] == f"pip install 'shotcast[{name}]'" for name, one in extras.items())
    return {name: one["ready"] for name, one in extras.items()}


def test_without_an_extra(installed: Callable[[str], Installed], model: Path) -> None:
    """Collectives, tables, plans; commands that need an extra name it, and the snippet of the README runs."""
    bare = installed("")
    assert not {"transformers", "fastapi", "matplotlib", "ray", "triton"} & bare.names
    assert bare.shotcast("--version").startswith("shotcast ")
    assert set(readiness(bare).values()) == {False}
    assert "gloo" in bare.shotcast(*BENCH)
    assert "tokens/s" in bare.shotcast("plan", "llama-3.1-8b", "-g", "2")
    tuned = ("--op", "all_reduce", "-d", "float32", "-b", "64", "-e", "64", "--seconds", "0.01", "--force")
    assert "wrote t.json" in bare.shotcast("tune", "--device", "cpu", "-g", "2", *tuned, "-o", "t.json")
    (snippet,) = re.findall(r"```python\n(import torch, shotcast.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (bare.folder / "snippet.py").write_text(snippet)
    done = bare.run("snippet.py")
    assert done.stdout.strip() == str([[6.0] * 4] * 4), done.stderr
    interpreter = {"SHOTCAST_CPU_KERNELS": "interpreter", "TRITON_INTERPRET": "1"}
    assert "SHOTCAST_CPU_KERNELS=interpreter needs" in bare.run("snippet.py", **interpreter).stderr
    done = bare.run(ROOT / "examples" / "06_own_algorithm.py")
    assert done.stderr == "this example needs Triton: pip install 'shotcast[triton]'\n"
    for command in (("generate", model, "a"), ("chat", model), ("serve", model), ("bench", "engine", model)):
        assert re.search(r"pip install 'shotcast\[engine\]'|shotcast\[server\]", bare.refused(*command)), command
    assert "shotcast[plots]" in bare.refused(*BENCH, "--plot", "a.png")
    for code, extra in (
        ("import shotcast.server.main", "server"),
        ("from shotcast.integrations import ray; ray.register()", "ray"),
    ):
        last = bare.run("-c", code).stderr.strip().splitlines()[-1]
        assert re.fullmatch(rf"shotcast\.errors\..*: pip install 'shotcast\[{extra}\]'", last), last
    done = bare.run("-c", "from shotcast import LLM")
    assert done.stderr.strip().endswith("pip install 'shotcast[engine]'")


def test_engine(installed: Callable[[str], Installed], model: Path) -> None:
    engine = installed("engine")
    assert not {"fastapi", "matplotlib", "triton"} & engine.names
    assert readiness(engine)["engine"]
    options = ("--device", "cpu", "--tensor-parallel", "2", "--max-tokens", "4")
    assert engine.shotcast("generate", model, "abc", *options)
    points = (
        "--layouts",
        "1x1",
        "--batches",
        "1",
        "--prompt",
        "4",
        "--output",
        "4",
        "--rounds",
        "1",
        "--device",
        "cpu",
    )
    assert "1x1" in engine.shotcast("bench", "engine", model, *points)
    assert "shotcast[server]" in engine.refused("serve", model, "--device", "cpu")


def test_server(installed: Callable[[str], Installed], model: Path) -> None:
    server = installed("server")
    assert not {"matplotlib", "triton", "ray"} & server.names
    assert readiness(server) == {"engine": True, "server": True, "plots": False, "ray": False}
    command = [server.python, "-m", "shotcast", "serve", model, "--device", "cpu", "--port", "0"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=server.folder, env=server.environment() | {"COLUMNS": "200"}
    )
    try:
        assert process.stderr is not None
        urls = (re.search(r"serving .* at (http://127\.0\.0\.1:\d+/v1)", line) for line in process.stderr)
        url = next(found[1] for found in urls if found)
        body = {"model": str(model), "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{url}/completions", json=body, timeout=100)
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
    finally:
        process.terminate()
        process.communicate(timeout=300)


def test_ray(installed: Callable[[str], Installed]) -> None:
    """The program of the guide."""
    ray = installed("ray")
    assert not {"transformers", "matplotlib", "triton"} & ray.names
    assert readiness(ray)["ray"]
    guide = (ROOT / "docs" / "guides" / "ray.md").read_text()
    (program,) = re.findall(r"```python\n(import ray\n.*?)```", guide, re.DOTALL)
    (ray.folder / "program.py").write_text(program)
    done = ray.run("program.py")
    assert done.stdout.strip().endswith(str([[1.0] * 4] * 2)), done.stderr[-3000:]


INTERPRETED = """
import torch, shotcast

def work():
    with shotcast.Communicator(device="cpu") as comm:
        return comm.all_reduce(torch.ones(4), algorithm="one_shot").tolist()

if __name__ == "__main__":
    print(shotcast.spawn(work, 2))
"""


def test_triton(installed: Callable[[str], Installed]) -> None:
    """Kernels of GPUs run in its interpreter, which is refused where it is not installed."""
    triton = installed("triton")
    assert "triton" in triton.names
    (triton.folder / "sums.py").write_text(INTERPRETED)
    interpreter = {"SHOTCAST_CPU_KERNELS": "interpreter", "TRITON_INTERPRET": "1"}
    done = triton.run("sums.py", **interpreter)
    assert done.stdout.strip() == str([[2.0] * 4] * 2), done.stderr[-3000:]


def test_plots(installed: Callable[[str], Installed]) -> None:
    plots = installed("plots")
    assert readiness(plots)["plots"]
    assert "wrote a.png" in plots.shotcast(*BENCH, "--plot", "a.png")
    assert (plots.folder / "a.png").read_bytes().startswith(b"\x89PNG")


def test_every_extra_is_tried() -> None:
    """But those of GPUs' hosts, whose packages cannot be installed without them, and of those who develop."""
    tried = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(EXTRAS) - {"dev", "docs", "vllm", "sglang"} <= tried
