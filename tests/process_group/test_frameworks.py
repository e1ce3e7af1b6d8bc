"""The scripts of examples/frameworks, unchanged, by the backend "shotcast" and by Gloo; and killed ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

import framework_targets
import frameworks
import pytest
import torch.distributed as dist
from frameworks import LOSSES, PARAMETERS, TOKENS, Run

from hosts import SimulatedHosts, needs_hosts
from shotcast.errors import RankFailed
from shotcast.launcher.spawn import spawn

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "ddp": ("--steps", "20"),
    "zero": ("--steps", "12"),
    "fsdp2": ("--steps", "8"),
    "dtensor": ("--steps", "6"),
    "checkpoint": ("--steps", "3"),
    "transformers_generate": ("--tokens", "12"),
}
"""The scripts that the default tests run, with their arguments."""
COMPILED = {
    "functional_collectives": ("--steps", "6"),
    "transformers_generate": ("--tokens", "12", "--compile", "1"),
}
BACKENDS = ("gloo", "shotcast", "shotcast")
TWICE = ("ddp", "fsdp2")
"""Scripts that the default tests run twice by our backend, for their bits; the full tests run all so."""
OWN_CALLS = {
    "ddp": {"all_gather", "broadcast", "all_reduce"},
    "zero": {"all_reduce", "broadcast"},
    "fsdp2": {"all_gather", "reduce_scatter", "all_reduce"},
    "dtensor": {"all_reduce", "scatter", "all_gather_coalesced", "broadcast"},
    "checkpoint": {"all_gather", "broadcast", "gather", "scatter"},
    "transformers_generate": {"all_reduce"},
    "functional_collectives": {"all_reduce", "all_to_all", "broadcast", "all_reduce_coalesced"},
}
"""The calls of each script, all of which native kernels serve."""
OWN_CALLS_OF_ACCELERATE = {"broadcast", "all_gather", "all_reduce"}

Results = dict[str, list[list[Run]]]
"""The runs of each script by backend, and of these those of each rank."""


def results(scripts: dict[str, tuple[str, ...]], world_size: int, timeout_s: float, twice: Container[str]) -> Results:
    order = [
        (name, backend, arguments)
        for name, arguments in scripts.items()
        for backend in BACKENDS[: 3 if name in twice else 2]
    ]
    found: Results = {name: [] for name in scripts}
    by_rank = spawn(frameworks.runs, world_size, order, timeout_s=timeout_s)
    for (name, _, _), ranks in zip(order, zip(*by_rank, strict=True), strict=True):
        found[name].append(list(ranks))
    return found


@pytest.fixture(scope="module")
def two() -> Results:
    return results(SCRIPTS, 2, 200, TWICE)


def check(name: str, found: Results, library: str = "gloo") -> None:
    gloo, own, *again = found[name]
    for rank, run in enumerate(own):
        for other in again:
            assert run.exact() == other[rank].exact()
            assert run.values.get(LOSSES) == other[rank].values.get(LOSSES)
        assert run.values.get(PARAMETERS) == own[0].values.get(PARAMETERS)
        assert run.values.get(TOKENS) == gloo[rank].values.get(TOKENS)
        assert "False" not in run.values.values()
        by_own = {op for op, ways in run.counts.items() if ways.get("own")}
        assert OWN_CALLS[name] <= by_own, run.counts
        if (off := frameworks.off(run, gloo[rank])) is not None:
            assert off < 1e-4
            losses = run.numbers(LOSSES)
            assert losses[-1] < losses[0]
        if library == "gloo":
            assert frameworks.calls(run.counts)[1] == 0, run.counts
    assert not any(run.counts for run in gloo)


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_results_are_those_by_gloo_and_the_same_on_every_run(name: str, two: Results) -> None:
    check(name, two)


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_three_ranks(name: str) -> None:
    if name == "transformers_generate":
        pytest.skip("its 8 heads cannot be divided among 3 ranks")
    check(name, results({name: SCRIPTS[name]}, 3, 300, SCRIPTS))


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    check(name, results({name: COMPILED[name]}, 2, 500, COMPILED))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["shotcast", pytest.param("gloo", marks=pytest.mark.full)])
def test_accelerates_own_script(backend: str) -> None:
    (run, _) = spawn(frameworks.run, 2, "accelerate_script", backend, timeout_s=200)
    if backend == "shotcast":
        assert {op for op, ways in run.counts.items() if ways.get("own")} >= OWN_CALLS_OF_ACCELERATE


@pytest.mark.timing
@pytest.mark.parametrize(
    ("script", "place", "count", "world_size", "arguments"),
    [
        pytest.param("ddp", "DistributedDataParallel", 30, 3, ("--steps", "1000000"), id="ddp-backward"),
        pytest.param("ddp", "step", 30, 3, ("--steps", "1000000"), id="ddp-step", marks=pytest.mark.full),
        pytest.param(
            "transformers_generate", "LlamaForCausalLM", 9, 2, ("--tokens", "1000"),
            id="transformers", marks=pytest.mark.full,
        ),
        pytest.param("fsdp2", "step", 10, 3, ("--steps", "1000000"), id="fsdp2", marks=pytest.mark.full),
        pytest.param("dtensor", "step", 10, 2, ("--steps", "1000000"), id="dtensor", marks=pytest.mark.full),
        pytest.param("zero", "step", 10, 3, ("--steps", "1000000"), id="zero", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_killed_rank_is_named(
    script: str, place: str, count: int, world_size: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    given = (str(tmp_path), place, count, script, *arguments, "--timeout", "300")
    found = spawn(framework_targets.survive, world_size, *given, timeout_s=400, return_exceptions=True)
    assert isinstance(found[framework_targets.KILLED], RankFailed)
    for rank, result in enumerate(found):
        if rank == framework_targets.KILLED:
            continue
        assert isinstance(result, tuple), result
        kind, missing, text, after_s, left = result
        if (kind, missing) != ("CollectiveTimeout", (framework_targets.KILLED,)):
            # DDP waits in C++, which knows errors by their text alone
            assert (kind, place) == ("RuntimeError", "DistributedDataParallel")
            assert re.search(r"CollectiveTimeout: rank \d: .*dead ranks: 1\b", text), text
        assert after_s < 60  # of 300
        assert not left


PROCESS = """
import runpy, sys
from framework_targets import die_at
folder, place, count, *sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
die_at(folder, place, int(count))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize(
    ("script", "place", "world_size", "arguments"),
    [
        ("ddp", "DistributedDataParallel", 3, ("--steps", "1000000")),
        ("fsdp2", "step", 2, ("--steps", "1000000")),
        ("transformers_generate", "LlamaForCausalLM", 2, ("--tokens", "1000")),
    ],
)
def test_processes_end_when_nobody_catches_the_error(
    script: str, place: str, world_size: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Kill a rank as under Slurm, where nothing ends the other ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    path = str(ROOT / "examples" / "frameworks" / f"{script}.py")
    command = [sys.executable, "-c", PROCESS, str(tmp_path), place, "9", path, *arguments]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        assert ranks[framework_targets.KILLED].wait(120) == -signal.SIGKILL
        for rank, process in enumerate(ranks):
            if rank != framework_targets.KILLED:
                _, errors = process.communicate(timeout=300)
                assert process.returncode == 1, errors
                assert re.search(r"CollectiveTimeout: rank \d: .*dead ranks: 1\b", errors), errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.full
@needs_hosts
def test_ddp_on_two_hosts() -> None:
    order = [("ddp", backend, SCRIPTS["ddp"]) for backend in BACKENDS]
    with SimulatedHosts(2, delay_us=200) as network:
        by_rank = network.run(frameworks.runs, 2, order, timeout_s=200)
        network.check()
    check("ddp", {"ddp": [list(runs) for runs in zip(*by_rank, strict=True)]})


@pytest.mark.full
@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "frameworks").glob("*.py")), ids=lambda file: file.stem)
@pytest.mark.parametrize("backend", ["shotcast", "gloo"])
def test_the_command_of_the_docstring(file: Path, backend: str) -> None:
    commands = re.findall(r"^ +torchrun (.+)$", file.read_text().split('"""')[1], re.M)
    assert commands or file.stem == "common"
    for command in commands[:1]:
        words = command.replace("--backend shotcast", f"--backend {backend}").split()
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
        done = subprocess.run(launch, capture_output=True, text=True, cwd=ROOT, timeout=300, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        said = re.findall(r"^(?:rank \d: |accelerate's test script has passed)", done.stdout, re.M)
        assert len(said) == 2, done.stdout


def test_the_page_of_compatibility_has_what_scripts_call() -> None:
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    for name, ops in {**OWN_CALLS, "accelerate_script": OWN_CALLS_OF_ACCELERATE}.items():
        row = re.search(rf"^\| `{name}` \|.*\| ([^|]*) \|$", page, re.M)
        assert row is not None, name
        assert set(re.findall(r"`(\w+)`", row[1])) == ops, name


def test_every_script_is_run() -> None:
    names = {file.stem for file in (ROOT / "examples" / "frameworks").glob("*.py")} - {"common"}
    assert names == {*SCRIPTS, *COMPILED, "accelerate_script"}
    assert {case.script for case in frameworks.CASES} <= names


def test_results_of_runs_are_compared() -> None:
    right = Run({"losses": "2 1", "parameters": "a"}, {"all_reduce": {"own": 2}})
    row = frameworks.compared("x", "gloo", [[right]] * 2, [[right]] * 2)
    assert (row.same_bits, row.off, row.own_ms) == (True, 0.0, [0.0, 0.0])
    for wrong, library in (
        ([[right], [Run({"losses": "2 1", "parameters": "b"}, right.counts)]], [[right]] * 2),
        ([[right]] * 2, [[Run({"losses": "2 1.1"})]] * 2),
        ([[Run({"losses": "2 1"}, {"all_reduce": {"inner": 2}})]] * 2, [[right]] * 2),
        ([[Run({"tokens": "1 2"}, right.counts)]] * 2, [[Run({"tokens": "1 3"})]] * 2),
    ):
        with pytest.raises(ArithmeticError):
            frameworks.compared("x", "gloo", wrong, library)


def test_the_page_of_benchmarks_has_what_was_measured() -> None:
    result = json.loads((ROOT / "benchmarks" / "data" / "cpu" / "frameworks.json").read_text())
    assert frameworks.markdown(result["rows"]) in (ROOT / "docs" / "benchmarks.md").read_text()
