"""Tuning: the search, that only right results can win, and that a new table is used."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tune_targets as targets
from hypothesis import given
from hypothesis import strategies as st

import shotcast
from shotcast.bench import tune, tune_table
from shotcast.bench.tune import (
    GAIN,
    NEAR,
    Timed,
    TuneConfig,
    TunedChoice,
    TunePoint,
    eligible_candidates,
    search,
    settled,
)
from shotcast.collectives import fingerprints
from shotcast.collectives.algorithm import CollectiveProblem, Topology
from shotcast.collectives.choice.candidates import (
    keeps_bits,
    launch_shapes,
    launch_unsupported_reason,
    unsupported_reason,
)
from shotcast.collectives.choice.choice import Candidate
from shotcast.collectives.choice.table import parse
from shotcast.collectives.registry import registered
from shotcast.errors import ConfigError, ShotcastError
from shotcast.hardware.detect import cpu_model
from shotcast.hardware.nodes import NodeLayout
from shotcast.transport.network import HOSTS
from shotcast.transport.triton import GPUS
from shotcast.wire import LaunchShape, NodeShape, Op
from transports_by_name import named

CONFIG = TuneConfig(
    ops=("all_reduce",),
    device="cpu",
    dtypes=("float32",),
    sizes=(4096,),
    modes=("eager",),
    seconds=0.05,
    timeout_s=500,
)


def problem(op: Op = Op.ALL_REDUCE, nbytes: int = 1 << 20, kernels: str = "triton", world_size: int = 4) -> Any:
    device = "cuda" if kernels == "triton" else "cpu"
    place = Topology(NodeLayout.one_node(world_size), device, "H", named(kernels), "", True, 512 << 20, registered())
    return CollectiveProblem(op, nbytes, "bfloat16", place)


class Bench:
    """Measures with a function of the candidate, and records the candidates that were measured."""

    def __init__(self, times: Any):
        self.times = times
        self.asked: list[list[Candidate]] = []
        self.seconds = 0.0

    def __call__(self, asked: Sequence[Candidate], seconds: float) -> Mapping[Candidate, float | None]:
        assert len(set(asked)) == len(asked)
        self.asked.append(list(asked))
        self.seconds += seconds
        return {candidate: self.times(candidate) for candidate in asked}


BY_ALGORITHM = {"one_shot": 10.0, "two_shot": 20.0, "ring": 5.0, "vendor": 30.0, "multimem": 4.0, "two_shot_fp8": 3.0}


class TestSearch:
    def test_the_fastest_wins_with_its_default(self) -> None:
        bench = Bench(lambda candidate: BY_ALGORITHM[candidate.algorithm])
        found = search(problem(), bench, 1.0)
        assert (found.best.algorithm, found.best.by_default, found.best.time_us) == ("one_shot", True, 10.0)
        assert bench.seconds == pytest.approx(1.0)

    def test_only_those_near_the_fastest_have_other_shapes_measured(self) -> None:
        times = BY_ALGORITHM | {"two_shot": 10.0 * NEAR, "vendor": 10.1}
        bench = Bench(lambda candidate: times[candidate.algorithm])
        search(problem(), bench, 1.0)
        assert {c.algorithm for c in bench.asked[0]} == {"one_shot", "two_shot", "vendor"}
        assert {c.algorithm for c in bench.asked[2]} == {"one_shot", "two_shot"}
        wanted = {Candidate(name, s) for name in ("one_shot", "two_shot") for s in launch_shapes(problem(), name)[1:]}
        assert set(bench.asked[2]) == wanted
        times["two_shot"] = 10.0 * NEAR + 0.1
        bench = Bench(lambda candidate: times[candidate.algorithm])
        search(problem(), bench, 1.0)
        assert {c.algorithm for c in bench.asked[2]} == {"one_shot"}
        assert {c.algorithm for c in bench.asked[3]} == {"one_shot", "vendor"}, "the vendor library is always compared"

    def test_one_disturbed_moment_costs_no_place(self) -> None:
        calls = itertools.count()
        found = search(problem(), Bench(lambda c: BY_ALGORITHM[c.algorithm] * (50 if next(calls) == 0 else 1)), 1.0)
        assert found.best.algorithm == "one_shot"

    @pytest.mark.parametrize(("gain", "by_default"), [(1.01, True), (1.1, False)])
    def test_a_shape_must_gain_something(self, gain: float, by_default: bool) -> None:
        fast = launch_shapes(problem(), "one_shot")[3]
        times = {"one_shot": 10.0, "two_shot": 40.0, "vendor": 40.0}
        bench = Bench(lambda c: 10.0 / gain if c == Candidate("one_shot", fast) else times[c.algorithm])
        best = search(problem(), bench, 1.0).best
        assert (best.algorithm, best.by_default) == ("one_shot", by_default)
        assert by_default or best.launch == fast

    @pytest.mark.parametrize(("vendor", "wins"), [(9.9, "one_shot"), (9.0, "vendor")])
    def test_the_vendor_library_must_be_faster(self, vendor: float, wins: str) -> None:
        times = BY_ALGORITHM | {"vendor": vendor}
        assert search(problem(), Bench(lambda c: times[c.algorithm]), 1.0).best.algorithm == wins

    @pytest.mark.parametrize(
        ("world_size", "any_bits", "wins"), [(2, False, "ring"), (4, False, "one_shot"), (4, True, "ring")]
    )
    def test_bits_of_the_contract_unless_any_will_do(self, world_size: int, any_bits: bool, wins: str) -> None:
        asked = problem(world_size=world_size)
        best = search(asked, Bench(lambda c: BY_ALGORITHM[c.algorithm]), 1.0, any_bits).best
        if not (any_bits and unsupported_reason(asked, "multimem") == ""):
            assert best.algorithm == wins
        assert best.algorithm != "two_shot_fp8"

    def test_fp8_is_never_an_implementation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shared = {name for name, one in registered().items() if any(form.shared_from for form in one.forms.values())}
        on_a_node = {name for name, one in registered().items() if not one.between_nodes and not one.keeps_to_sms}
        on_a_node -= shared
        everything = tuple(Candidate(name, LaunchShape()) for name in on_a_node)
        monkeypatch.setattr(tune, "candidates", lambda asked: everything)
        assert {c.algorithm for c in eligible_candidates(problem(), False)} == {"one_shot", "two_shot", "vendor"}
        assert {c.algorithm for c in eligible_candidates(problem(), True)} == on_a_node - {"two_shot_fp8"}

    def test_launches_found_before_are_all_that_is_measured(self) -> None:
        shape = launch_shapes(problem(), "two_shot")[2]
        times = BY_ALGORITHM | {"two_shot": 9.0}
        bench = Bench(lambda c: times[c.algorithm])
        best = search(problem(), bench, 1.0, launches={"two_shot": shape}).best
        assert (best.algorithm, best.launch, best.by_default) == ("two_shot", shape, False)
        assert len(bench.asked) == 3
        assert {c.launch for c in bench.asked[0] if c.algorithm == "two_shot"} == {shape}

    def test_wrong_ones_cannot_win_at_any_stage(self) -> None:
        shapes = launch_shapes(problem(), "two_shot")
        bad = {Candidate("one_shot", launch_shapes(problem(), "one_shot")[0]), Candidate("two_shot", shapes[4])}
        bench = Bench(lambda c: None if c in bad else {"two_shot": 20.0}.get(c.algorithm, 30.0))
        found = search(problem(), bench, 1.0)
        assert set(found.wrong) == bad
        assert found.best.algorithm == "two_shot"
        assert not {(one.algorithm, one.launch) for one in (found.best, *found.others)} & {
            (c.algorithm, c.launch) for c in bad
        }
        assert all(c.algorithm != "one_shot" for asked in bench.asked[1:] for c in asked)

    def test_one_that_goes_wrong_in_the_last_stage_cannot_win(self) -> None:
        def times(candidate: Candidate) -> float | None:
            return None if len(bench.asked) == 4 and candidate.algorithm == "one_shot" else 10.0

        bench = Bench(times)
        found = search(problem(), bench, 1.0)
        assert found.best.algorithm != "one_shot"
        assert {c.algorithm for c in found.wrong} == {"one_shot"}

    def test_nothing_right(self) -> None:
        with pytest.raises(ShotcastError, match="no algorithm gives right results for all_reduce of bfloat16, 1 MiB"):
            search(problem(), Bench(lambda c: None), 1.0)
        stages = itertools.count()
        with pytest.raises(ShotcastError, match="right results and then wrong ones for all_reduce of bfloat16, 1 MiB"):
            search(problem(nbytes=1 << 20), Bench(lambda c: 1.0 if next(stages) < 6 else None), 1.0)

    @given(
        st.sampled_from([Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER]),
        st.sampled_from(["triton", "compiled"]),
        st.integers(2, 8),
        st.integers(0, 26),
        st.booleans(),
        st.randoms(use_true_random=False),
    )
    def test_what_is_chosen_is_legal_right_and_no_slower_than_the_margin_allows(
        self, op: Op, kernels: str, world_size: int, bits: int, any_bits: bool, dice: Any
    ) -> None:
        asked = problem(op, 1 << bits, kernels, world_size)
        times: dict[Candidate, float | None] = {}

        def time(candidate: Candidate) -> float | None:
            if candidate not in times:
                times[candidate] = None if dice.random() < 0.1 else dice.uniform(1, 10)
            return times[candidate]

        try:
            found = search(asked, Bench(time), 1.0, any_bits)
        except ShotcastError:
            assert all(times[c] is None for c in eligible_candidates(asked, any_bits))
            return
        best = found.best
        assert unsupported_reason(asked, best.algorithm) == ""
        assert launch_unsupported_reason(named(kernels), registered()[best.algorithm], best.launch) == ""
        assert any_bits or best.algorithm == "vendor" or keeps_bits(asked, best.algorithm)
        assert {c for c, time_us in times.items() if time_us is None} == set(found.wrong)
        assert best.time_us == times[Candidate(best.algorithm, best.launch)]
        first = [times[c] for c in eligible_candidates(asked, any_bits)]
        assert best.time_us <= GAIN * min(time_us for time_us in first if time_us is not None)
        assert [one.time_us for one in found.others] == sorted(one.time_us for one in found.others)


def point(nbytes: int, *times: tuple[str, float], mode: str = "graph", shape: LaunchShape | None = None) -> TunePoint:
    """Return a point whose choice is the first of ``times``."""
    timed = [Timed(name, shape or LaunchShape(), shape is None, time_us) for name, time_us in times]
    return TunePoint(mode, "all_reduce", "bfloat16", nbytes, TunedChoice(timed[0], tuple(timed[1:]), ()))


class TestSms:
    """Calls that are given a number of SMs have rows of their own."""

    def test_other_launches_are_tried_and_the_library_is_not(self) -> None:
        asked = dataclasses.replace(problem(nbytes=64 << 20, world_size=2), sms=24)
        fast = launch_shapes(asked, "few_sms")[-1]
        bench = Bench(lambda c: 1.0 if c.algorithm == "vendor" else 5.0 if c.launch == fast else 10.0)
        found = search(asked, bench, 1.0)
        assert (found.best.algorithm, found.best.launch, found.best.by_default) == ("few_sms", fast, False)
        assert {c.algorithm for asked in bench.asked for c in asked} == {"few_sms"}

    def test_every_launch_has_room(self) -> None:
        for world_size, sms in ((2, 1), (2, 24), (4, 32), (8, 8)):
            asked = dataclasses.replace(problem(nbytes=64 << 20, world_size=world_size), sms=sms)
            shapes = launch_shapes(asked, "few_sms")
            assert len(set(shapes)) == len(shapes) > 1
            for shape in shapes:
                assert shape.programs <= sms
                assert launch_unsupported_reason(GPUS, registered()["few_sms"], shape) == ""
                assert registered()["few_sms"].forms[Op.ALL_REDUCE].launch_unsupported_reason(asked, shape) == ""

    def test_where_the_library_alone_serves_it_is_the_choice(self) -> None:
        asked = dataclasses.replace(problem(Op.REDUCE), sms=24)
        assert search(asked, Bench(lambda c: 1.0), 1.0).best.algorithm == "vendor"

    def test_rows_are_read_as_they_were_written(self) -> None:
        shape = LaunchShape(24, 4096, 16, 65536)
        points = [
            point(1 << 20, ("few_sms", 9.0)),
            dataclasses.replace(point(1 << 20, ("few_sms", 9.0)), sms=16),
            dataclasses.replace(point(1 << 24, ("few_sms", 9.0), ("few_sms", 9.5), shape=shape), sms=24),
        ]
        text = tune_table.document(
            "H",
            NodeShape(1, 2),
            points[1:],
            device="cuda",
            environment={"cpu_model": "c", "versions": {}, "driver": "5"},
            command="shotcast tune",
            seconds=0.5,
        )
        table = parse(text, "t", registered())
        assert table.rows == {key: tuple(rows) for key, rows in tune_table.rows(points[1:]).items()}
        (key,) = (key for key in table.rows if key[1] == "all_reduce@24")
        assert fingerprints.of_table(table, key, registered(), GPUS) == ""
        found = table.lookup("all_reduce", "bfloat16", 1 << 23, "graph", 20)
        assert found is not None
        assert (found.launch, found.sms) == (shape, 24)
        assert table.lookup("all_reduce", "bfloat16", 1 << 23, "graph") is None
        assert json.loads(text)["measurements"][1]["op"] == "all_reduce@24"
        assert len(tune_table.rows(points)) == 3

    def test_calls_are_given_the_sms(self) -> None:
        made: list[Any] = []
        context: Any = SimpleNamespace(comm=SimpleNamespace(_run=lambda *args, **options: made.append(options)))
        case = object.__new__(tune.TuneCase)
        case.context, case.op, case.x, case.sms = context, "all_reduce", torch.ones(3), 24
        case._new = lambda: torch.empty(3)  # type: ignore[method-assign]
        case.call("0", Candidate("few_sms", LaunchShape(24))).run()
        case.sms = 0
        case.call("0", Candidate("vendor", LaunchShape())).run()
        assert [(options["sms"], options["launch"]) for options in made] == [(24, LaunchShape(24)), (None, None)]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"sms": (24,)}, "leave them out for CPU"),
            ({"sms": (300,)}, "numbers from 1 to 256"),
            ({"sms": ()}, "from 1"),
        ],
    )
    def test_what_is_refused(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            dataclasses.replace(CONFIG, **options)


class TestRows:
    KEY = ("graph", "all_reduce", "bfloat16")

    def algorithms(self, *points: TunePoint) -> list[tuple[float, str]]:
        return [(row.nbytes, row.algorithm) for row in tune_table.rows(points)[self.KEY]]

    def test_sizes_that_chose_alike_are_one_row_up_to_the_largest(self) -> None:
        points = [point(64, ("one_shot", 1)), point(256, ("one_shot", 1)), point(1024, ("two_shot", 1))]
        assert self.algorithms(*reversed(points)) == [(256, "one_shot"), (1024, "two_shot")]

    def test_past_the_largest_the_vendor_goes_on_and_nobody_else(self) -> None:
        assert self.algorithms(point(64, ("ring", 1)), point(128, ("vendor", 1))) == [
            (64, "ring"),
            (float("inf"), "vendor"),
        ]

    def test_another_launch_is_another_row(self) -> None:
        shape = LaunchShape(7)
        points = [point(64, ("ring", 1)), point(128, ("ring", 1), shape=shape), point(256, ("ring", 1), shape=shape)]
        rows = tune_table.rows(points)[self.KEY]
        assert [(row.nbytes, row.launch) for row in rows] == [(64, None), (256, shape)]

    def test_modes_are_kept_apart(self) -> None:
        found = tune_table.rows([point(64, ("ring", 1)), point(64, ("one_shot", 1), mode="eager")])
        assert {key[0]: rows[0].algorithm for key, rows in found.items()} == {"graph": "ring", "eager": "one_shot"}

    def test_noise_between_sizes_makes_no_row(self) -> None:
        points = [
            point(64, ("one_shot", 1.0), ("two_shot", 2.0)),
            point(128, ("two_shot", 1.00), ("one_shot", 1.02)),
            point(256, ("two_shot", 1.0), ("one_shot", 1.2)),
        ]
        after = settled(points)
        assert [p.choice.best.algorithm for p in after] == ["one_shot", "one_shot", "two_shot"]
        assert [one.time_us for one in after[1].choice.others] == [1.00]

    def test_the_vendor_library_does_not_stay_by_inertia(self) -> None:
        points = [point(64, ("vendor", 1.0), ("ring", 2.0)), point(128, ("ring", 1.0), ("vendor", 1.0))]
        assert [p.choice.best.algorithm for p in settled(points)] == ["vendor", "ring"]

    def test_settling_keeps_every_point_and_its_key(self) -> None:
        points = [point(n, ("ring", 1.0), mode=mode) for mode in ("graph", "eager") for n in (1, 2, 3)]
        assert settled(points) == points


class TestDocument:
    POINTS = (point(64, ("one_shot", 1.25), ("two_shot", 2.0)), point(64, ("ring", 1.0), mode="eager"))

    def text(self, *points: TunePoint, part: str = "H") -> str:
        environment = {"cpu_model": "c", "versions": {"torch": "2"}, "driver": "580"}
        return tune_table.document(
            part, NodeShape(1, 4), points, device="cuda", environment=environment, command="shotcast tune", seconds=0.5
        )

    def test_is_a_table_with_provenance_and_measurements(self) -> None:
        text = self.text(*self.POINTS)
        table = parse(text, "t", registered())
        assert (table.part, table.shape) == ("H", NodeShape(1, 4))
        assert table.rows == {key: tuple(rows) for key, rows in tune_table.rows(self.POINTS).items()}
        document = json.loads(text)
        ((date, run),) = document["provenance"].items()
        assert date.startswith("20")
        assert run["command"] == "shotcast tune"
        assert run["versions"] == {"torch": "2"}
        assert (run["driver"], run["seconds_a_size"]) == ("580", 0.5)
        assert run["entries"] == ["eager/all_reduce/bfloat16", "graph/all_reduce/bfloat16"]
        assert document["measurements"][0] == {
            "mode": "graph",
            "op": "all_reduce",
            "dtype": "bfloat16",
            "nbytes": 64,
            "chosen": ["one_shot", "default", 1.25],
            "others": [["two_shot", "default", 2.0]],
        }

    def test_merged(self) -> None:
        old = self.text(*self.POINTS).replace('"command": "shotcast tune"', '"command": "old"')
        old = old.replace(json.loads(old)["provenance"].popitem()[0], "2020-01-01")
        new = self.text(point(128, ("vendor", 1.0)))
        document = json.loads(tune_table.merged(old, new, "t"))
        assert document["entries"]["graph"]["all_reduce"]["bfloat16"] == [[None, "vendor", None]]
        assert document["entries"]["eager"]["all_reduce"]["bfloat16"] == [[64, "ring", None]]
        assert [run["command"] for run in document["provenance"].values()] == ["old", "shotcast tune"]
        assert [(m["mode"], m["nbytes"]) for m in document["measurements"]] == [("eager", 64), ("graph", 128)]

    def test_each_entry_has_the_fingerprints_of_the_kernels_that_were_measured(self) -> None:
        now = fingerprints.of_operation(registered(), Op.ALL_REDUCE, GPUS)
        table = parse(self.text(*self.POINTS), "t", registered())
        assert table.kernels == {
            ("graph", "all_reduce", "bfloat16"): {name: now[name] for name in ("one_shot", "two_shot")},
            ("eager", "all_reduce", "bfloat16"): {"ring": now["ring"]},
        }
        assert fingerprints.of_table(table, ("eager", "all_reduce", "bfloat16"), registered(), GPUS) == ""

    def test_merging_keeps_the_fingerprints_of_the_entries_that_stay(self) -> None:
        old = json.loads(self.text(*self.POINTS))
        for kernels in old["kernels"].values():
            kernels.update(dict.fromkeys(kernels, "older"))
        old["earlier_kernels"] = "measured in spring"
        new = self.text(point(128, ("one_shot", 1.0)))
        table = parse(tune_table.merged(json.dumps(old), new, "t"), "t", registered())
        eager, graph = ("eager", "all_reduce", "bfloat16"), ("graph", "all_reduce", "bfloat16")
        assert table.kernels[eager] == {"ring": "older"}
        assert table.kernels[graph] == parse(new, "t", registered()).kernels[graph]
        made_by = fingerprints.of_table(table, eager, registered(), GPUS)
        assert made_by == "made by earlier kernels (ring); measured in spring"
        assert fingerprints.of_table(table, graph, registered(), GPUS) == ""
        whole = self.text(*self.POINTS)
        assert parse(tune_table.merged(json.dumps(old), whole, "t"), "t", registered()).earlier_kernels == ""

    def test_what_is_replaced_as_a_whole_leaves_no_provenance(self) -> None:
        old = self.text(point(64, ("ring", 1.0))).replace("20", "19", 1)
        document = json.loads(tune_table.merged(old, self.text(point(64, ("one_shot", 1.0))), "t"))
        assert len(document["provenance"]) == 1
        assert document["entries"]["graph"]["all_reduce"]["bfloat16"] == [[64, "one_shot", None]]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (('"part": "H"', '"part": "G"'), "t.json is a table for 4 x G; this machine has 4 x H"),
            (('"world_size": 4', '"world_size": 2'), "t.json is a table for 2 x H; this machine has 4 x H"),
            (
                ('"world_size": 4', '"world_size": 4, "nodes": 2'),
                "t.json is a table for 4 x H on 2 nodes; this machine",
            ),
            (('"format": 3', '"format": 2'), "has format 2; this version reads format 3"),
        ],
    )
    def test_what_cannot_be_merged_is_refused(self, tmp_path: Path, change: tuple[str, str], said: str) -> None:
        path = tmp_path / "t.json"
        path.write_text(self.text(*self.POINTS).replace(*change))
        with pytest.raises(ConfigError, match=said):
            tune_table.merged(path.read_text(), self.text(*self.POINTS), str(path))
        with pytest.raises(ConfigError, match=said):
            tune_table.mergeable(path.read_text(), str(path), "H", NodeShape(1, 4))


class TestConfig:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"ops": ("broadcast",)}, "op to tune must be among all_reduce, reduce_scatter, all_gather, not broadcast"),
            ({"ops": ()}, "not none"),
            (
                {"dtypes": ("float32", "int8")},
                "dtype to tune must be among float32, float16, bfloat16, not float32, int8",
            ),
            ({"modes": ("lazy",)}, "mode to tune must be among graph, eager, not lazy"),
            ({"device": "tpu"}, "device to tune must be among cpu, cuda, not tpu"),
            ({"modes": ("graph",)}, "CPU ranks have no graphs"),
            ({"sizes": ()}, "must be at least 1 byte"),
            ({"sizes": (0, 4)}, "must be at least 1 byte"),
            ({"sizes": (8, 4)}, "ascend"),
            ({"seconds": -1.0}, "seconds for a size cannot be negative: -1"),
            ({"seconds": float("nan")}, "seconds for a size cannot be negative"),
        ],
    )
    def test_nonsense_is_refused(self, change: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            dataclasses.replace(CONFIG, **change)

    def test_interpreted_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHOTCAST_CPU_KERNELS", "interpreter")
        with pytest.raises(ConfigError, match="interpreted kernels are for testing"):
            dataclasses.replace(CONFIG)


class TestRanks:
    @pytest.mark.every(2)
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_wrong_candidate_never_enters(self, rank: int) -> None:
        """A candidate that is wrong on one rank is excluded on all ranks."""
        config = dataclasses.replace(CONFIG, sizes=(4096, 8192))
        for points in shotcast.spawn(targets.one_is_wrong, 2, config, rank, timeout_s=500):
            for found in points:
                assert found.choice.best.algorithm != "two_shot"
                assert {c.algorithm for c in found.choice.wrong} == {"two_shot"}
            assert "two_shot" not in json.dumps(json.loads(self.table(points))["entries"])
            assert [line.split(":")[0] for line in tune_table.wrong(points)] == [
                "all_reduce of float32, 4 KiB, eager",
                "all_reduce of float32, 8 KiB, eager",
            ]

    @pytest.mark.full
    def test_a_wrong_launch_never_enters(self) -> None:
        config = dataclasses.replace(CONFIG, sizes=(100_000,))
        for (found,) in shotcast.spawn(targets.one_launch_is_wrong, 2, config, timeout_s=500):
            assert {(c.algorithm, c.launch.chunk_bytes > 0) for c in found.choice.wrong} == {("two_shot", True)}
            assert not [
                t
                for t in (found.choice.best, *found.choice.others)
                if t.algorithm == "two_shot" and t.launch.chunk_bytes
            ]

    def test_nothing_right_is_no_table(self) -> None:
        for said in shotcast.spawn(targets.nothing_is_right, 2, CONFIG, timeout_s=500):
            assert said == "no algorithm gives right results for all_reduce of float32, 4 KiB"

    @pytest.mark.full
    def test_all_ranks_decide_alike_by_the_slowest(self) -> None:
        first, second = shotcast.spawn(targets.ranks_differ, 2, CONFIG, timeout_s=500)
        assert first == second
        assert first[0].choice.best.algorithm == "ring", "the only one that is slow to nobody"

    @staticmethod
    def table(points: list[TunePoint]) -> str:
        return tune_table.document(
            "cpu", NodeShape(1, 2), points, device="cpu", environment={}, command="", seconds=0.0
        )

    @pytest.mark.full
    def test_tuned_then_used(self, tmp_path: Path) -> None:
        config = dataclasses.replace(CONFIG, ops=("all_reduce", "all_gather"), sizes=(1024, 65536), seconds=0.02)
        part, shape, points = tune.run(config, 3)
        assert (part, shape) == (cpu_model(), NodeShape(1, 3))
        assert {p.key for p in points} == {("eager", op, "float32") for op in config.ops}
        for p in points:
            assert p.nbytes % (12 if p.op == "all_gather" else 4) == 0, "whole elements, equally many a rank"
        path = tmp_path / "t.json"
        path.write_text(tune_table.document(part, shape, points, device="cpu", environment={}, command="", seconds=0.0))
        counts = [100, 256, 300, 16384, 16400]
        for op in config.ops:
            settings = {"SHOTCAST_TABLE": str(path)}
            for said in shotcast.spawn(targets.by_table, 3, counts, op, env=settings, timeout_s=500):
                for count, (source, reason, algorithm, got) in zip(counts, said, strict=True):
                    nbytes = 4 * count * (3 if op == "all_gather" else 1)
                    row = parse(path.read_text(), "t", registered()).lookup(op, "float32", nbytes)
                    if row is None:
                        assert source == "cost model"
                    else:
                        assert (source, algorithm) == ("user table", row.algorithm)
                        assert reason.startswith(f"{path}: {algorithm} for ")
                    assert got == ([6.0, 6.0] if op == "all_reduce" else [1.0, 3.0])

    @pytest.mark.full
    def test_a_table_of_ranks_on_two_nodes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHOTCAST_RANKS_PER_NODE", "1")
        part, shape, points = tune.run(dataclasses.replace(CONFIG, sizes=(1024,), seconds=0.01), 2)
        assert shape == NodeShape(2, 1)
        text = tune_table.document(part, shape, points, device="cpu", environment={}, command="", seconds=0.0)
        table = parse(text, "t", registered())
        assert table.shape == shape
        known = fingerprints.of_operation(registered(), Op.ALL_REDUCE, HOSTS)
        assert known.keys() == {"nvrar", "nvrar_16bit", "nvrar_pairs", "nvrar_halving", "nvrar_two_shot", "vendor"}
        kernels = table.kernels["eager", "all_reduce", "float32"]
        assert {points[0].choice.best.algorithm} <= kernels.keys()
        assert kernels.items() <= known.items()
        path = tmp_path / "t.json"
        path.write_text(text)
        monkeypatch.setenv("SHOTCAST_TABLE", str(path))
        found = shotcast.spawn(targets.by_table, 2, [256], "all_reduce", timeout_s=300)[0][0]
        assert (found[0], found[2]) == ("user table", points[0].choice.best.algorithm)
        monkeypatch.delenv("SHOTCAST_RANKS_PER_NODE")
        assert shotcast.spawn(targets.by_table, 2, [256], "all_reduce", timeout_s=300)[0][0][0] == "cost model"

    @pytest.mark.full
    def test_tables_and_overrides_of_the_environment_decide_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHOTCAST_TABLE", "/no/such/table")
        monkeypatch.setenv("SHOTCAST_ALGORITHM", "ring")
        _, _, (found,) = tune.run(dataclasses.replace(CONFIG, sizes=(64,), seconds=0.0), 3)
        assert found.choice.best.algorithm != "ring"

    def test_sizes_between_are_measured_where_the_choice_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tuner = object.__new__(tune.Tuner)
        tuner.control = type("Control", (), {"world_size": 4})()  # type: ignore[assignment]
        tuner.tune_config = dataclasses.replace(CONFIG, sizes=(1024, 8192, 65536, 1 << 20))

        order: list[object] = []

        def chosen(op: str, dtype: str, mode: str, nbytes: int, known: TunedChoice | None) -> TunedChoice:
            order.append(nbytes)
            return point(nbytes, ("one_shot" if nbytes < 20_000 else "two_shot", 1.0)).choice

        monkeypatch.setattr(tuner, "_choice", chosen)
        begin = lambda: order.append("begin")  # noqa: E731
        measured = [p.nbytes for p in tuner._sizes("all_reduce", "float32", "eager", {}, begin)]
        assert measured == [1024, 8192, 16384, 32768, 65536, 1 << 20]
        listed = [part for size in tuner.tune_config.sizes for part in ("begin", size)]
        assert order[: len(listed)] == listed, "progress counts the sizes that were asked for"
        assert sorted(order[len(listed) :]) == [16384, 32768]
