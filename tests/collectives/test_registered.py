"""Algorithms that users register: validated, compared, chosen, measured and tuned like the built-in ones."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import registered_targets as targets
import result_tables
from registered_targets import COPYCAT

import shotcast
import transports_by_name
from shotcast import wire
from shotcast.bench import implementations, plot
from shotcast.bench.tune import eligible_candidates
from shotcast.collectives import registry
from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, Topology
from shotcast.collectives.choice.candidates import unsupported_reason
from shotcast.collectives.choice.select import choose
from shotcast.collectives.choice.table import parse
from shotcast.collectives.registry import from_environment, import_named, register_algorithm, registered
from shotcast.errors import ConfigError
from shotcast.hardware.nodes import NodeLayout
from shotcast.wire import NodeShape, Op


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the algorithms that a test registers when it ends."""
    monkeypatch.setattr(registry, "_added", [])
    registry._import_once.cache_clear()
    yield
    registry._import_once.cache_clear()


pytestmark = pytest.mark.usefixtures("own_registry")


def named(name: str, **changes: object) -> Algorithm:
    return dataclasses.replace(COPYCAT, name=name, **changes)  # type: ignore[arg-type]


class TestRefused:
    @pytest.mark.parametrize("name", ["ring", "vendor", "copycat"])
    def test_a_name_that_is_taken(self, name: str) -> None:
        register_algorithm(COPYCAT)
        with pytest.raises(ConfigError, match=rf"there is an algorithm '{name}' already; .*two_shot.*copycat"):
            register_algorithm(named(name))

    @pytest.mark.parametrize("name", ["auto", "lossless", "", "Two", "2_shot", "my-own", "a b"])
    def test_a_name_that_cannot_be_one(self, name: str) -> None:
        with pytest.raises(ConfigError, match="cannot name an algorithm"):
            register_algorithm(named(name))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"library": True}, "it is no library"),
            ({"forms": {}}, "at least one operation"),
            ({"forms": {Op.BARRIER: COPYCAT.forms[Op.ALL_REDUCE]}}, "forms are Form objects of Op.ALL_REDUCE"),
            ({"forms": {Op.ALL_REDUCE: "kernel"}}, "forms are Form objects"),
            ({"forms": {Op.ALL_REDUCE: Form(work=targets.work)}}, "neither a Triton nor a CPU kernel"),
            ({"lossy": True}, "error_bound must say how far off"),
        ],
    )
    def test_an_incomplete_description(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            register_algorithm(named("other", **changes))
        assert "other" not in registered()

    def test_not_a_description(self) -> None:
        with pytest.raises(ConfigError, match=r"takes a shotcast\.Algorithm, not str"):
            register_algorithm("two_shot")  # type: ignore[arg-type]

    def test_more_algorithms_than_headers_can_encode(self) -> None:
        for number in range(wire.MAX_ALGORITHMS - len(registered())):
            register_algorithm(named(f"number_{number}"))
        plan = wire.CallPlan(Op.ALL_REDUCE, tuple(registered())[-1], "float32", 64)
        assert wire.Header.decode(registered().header(plan), tuple(registered())).algorithm == plan.algorithm
        with pytest.raises(ConfigError, match=f"headers tell {wire.MAX_ALGORITHMS} algorithms apart"):
            register_algorithm(named("one_more"))

    @pytest.mark.parametrize(
        ("name", "message"), [("no.such.module", "ModuleNotFoundError"), ("no_such_file.py", "FileNotFoundError")]
    )
    def test_a_module_that_cannot_be_imported(self, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
        monkeypatch.setenv("SHOTCAST_ALGORITHMS", name)
        with pytest.raises(ConfigError, match=f"SHOTCAST_ALGORITHMS: cannot import {name}: {message}"):
            import_named()


def topology(kernels: str = "compiled") -> Topology:
    return Topology(
        NodeLayout.one_node(4), "cpu", "cpu", transports_by_name.named(kernels), "", False, 1 << 20, registered()
    )


def test_every_part_of_the_package_knows_the_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Legality, choice, environment, tables, bench, labels and colors all follow from the description."""
    register_algorithm(COPYCAT)
    problem = CollectiveProblem(Op.ALL_REDUCE, 4096, "float32", topology())
    assert unsupported_reason(problem, "copycat") == ""
    assert "there is no copycat broadcast" in unsupported_reason(
        dataclasses.replace(problem, op=Op.BROADCAST), "copycat"
    )
    gather = CollectiveProblem(Op.ALL_GATHER, 4096, "float32", topology("interpreter"))
    assert unsupported_reason(gather, "copycat") == "copycat has no Triton kernel"
    assert choose(problem, "auto", "auto", ()).candidate.algorithm == "copycat", "it is predicted to be fastest"
    text = json.dumps(
        {
            "format": 3,
            "part": "cpu",
            "world_size": 4,
            "entries": {"eager": {"all_reduce": {"float32": [[None, "copycat", None]]}}},
        }
    )
    row = parse(text, "t", registered()).lookup("all_reduce", "float32", 1)
    assert row is not None
    assert row.algorithm == "copycat"
    monkeypatch.setenv("SHOTCAST_ALGORITHM", "copycat")
    assert from_environment() == "copycat"
    assert "copycat" in implementations.default("all_reduce", "cpu")
    assert result_tables.label("copycat") == "copy cat"
    assert plot.color_of("copycat") == "#123456"


def test_a_kernel_without_a_compiled_form_says_what_runs_it() -> None:
    form = Form(work=targets.work, triton="shotcast.transport.triton.two_shot:bind")
    register_algorithm(named("gpu_only", forms={Op.ALL_REDUCE: form}))
    problem = CollectiveProblem(Op.ALL_REDUCE, 64, "float32", topology())
    assert "SHOTCAST_CPU_KERNELS=interpreter" in unsupported_reason(problem, "gpu_only")


def test_built_in_algorithms_are_registered() -> None:
    between_nodes = {"nvrar", "nvrar_16bit", "nvrar_pairs", "nvrar_halving", "nvrar_two_shot"}
    one_node = {"one_shot", "two_shot", "two_shot_fp8", "few_sms", "copy_engines", "multimem", "ring"}
    assert set(registered()) == one_node | between_nodes | {"vendor"}
    assert {name for name, algorithm in registered().items() if algorithm.between_nodes} == between_nodes
    assert list(registered())[-1] == "vendor"


class TestRanks:
    def test_serves_calls_and_is_explained(self) -> None:
        for total, chosen, candidates, reason, same in shotcast.spawn(targets.registered_before, 3, timeout_s=300):
            assert total == [111.0] * 5
            assert chosen == "copycat"
            assert "copycat" in candidates
            assert "copycat" in reason
            assert same

    def test_a_communicator_knows_only_earlier_registrations(self) -> None:
        for message in shotcast.spawn(targets.registered_later, 2, timeout_s=300):
            assert message.startswith("all_reduce: unknown algorithm 'copycat'; there are auto, lossless, one_shot")

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ("gathers", r"algorithm gatherer is wrong in its first check, all_to_all of "),
            ("rounds at each hop", r"algorithm ring_too is wrong .*element \d+ has other bits than its reference"),
        ],
    )
    def test_wrong_results_are_refused_on_all_ranks(self, what: str, message: str) -> None:
        errors = shotcast.spawn(targets.error_of_wrong_algorithm, 3, what, timeout_s=300)
        assert len(set(errors)) == 1
        assert re.search(message, errors[0]), errors[0]

    @pytest.mark.full
    def test_an_algorithm_between_hosts(self) -> None:
        env = {"SHOTCAST_RANKS_PER_NODE": "1"}
        assert shotcast.spawn(targets.over_nodes, 3, "nvrar:ALL_REDUCE", env=env, timeout_s=300) == [("mine", "")] * 3
        for _, error in shotcast.spawn(targets.over_nodes, 3, "meet:BARRIER", env=env, timeout_s=300):
            assert "algorithm mine is wrong in its first check, all_reduce of float32" in error

    def test_lossy_algorithm_is_chosen_where_allowed(self) -> None:
        assert set(shotcast.spawn(targets.lossy, 2, timeout_s=300)) == {"ring_too"}

    def test_registrations_that_differ_between_ranks(self) -> None:
        for message in shotcast.spawn(targets.error_of_differing_names, 2, ("mine", "yours"), timeout_s=300):
            assert "the ranks do not agree on registered algorithms: rank 0: mine #" in message
            assert "rank 1: yours #" in message
        for message in shotcast.spawn(targets.error_of_differing_descriptions, 2, timeout_s=300):
            assert "the ranks do not agree on registered algorithms: rank 0: copycat #" in message


@pytest.mark.full
def test_command_lines_measure_and_tune_the_algorithm(tmp_path: Path) -> None:
    register_algorithm(COPYCAT)
    file = str(Path(targets.__file__))
    environment = os.environ | {"SHOTCAST_ALGORITHMS": file}

    def shotcast_command(*arguments: str) -> None:
        command = [sys.executable, "-m", "shotcast", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, result.stdout + result.stderr

    size = ["-b", "4K", "-e", "4K", "--device", "cpu", "--world-size", "2"]
    rows = tmp_path / "rows.json"
    names = ["--algorithms", "copycat,two_shot"]
    shotcast_command("bench", "all-reduce", *size, *names, "-n", "5", "-w", "1", "--json", str(rows))
    timed = {row["algorithm"]: row["time_us"] for row in json.loads(rows.read_text())["rows"]}
    assert timed.keys() == {"copycat", "two_shot"}
    assert all(timed.values())
    table = tmp_path / "table.json"
    shotcast_command(
        *("tune", "--op", "all_reduce", *size, "-d", "float32", "--seconds", "0.3", "--force", "-o", str(table))
    )
    assert parse(table.read_text(), "t", registered()).shape == NodeShape(1, 2)
    problem = CollectiveProblem(Op.ALL_REDUCE, 4096, "float32", topology())
    assert "copycat" in [candidate.algorithm for candidate in eligible_candidates(problem, False)], "tuning measures it"
