"""Random legal programs of torch.distributed by our backend, and the generator, its rules and its shrinking."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import legal_program_targets as targets
import legal_programs
import pytest
import torch
from program_draw import LARGEST, census, draw
from program_shrink import shrink
from program_steps import (
    REDUCTIONS,
    Capture,
    Collective,
    Fill,
    Group,
    HostSleep,
    IllegalError,
    Messages,
    Product,
    Program,
    Replay,
    Shorten,
    Slot,
    Step,
    Wait,
    check,
    every_step,
    read,
)
from program_values import Expected

import shotcast
from shotcast.collectives.rank_device import enough_gpus

DATA = sorted((Path(__file__).parents[2] / "benchmarks/data").glob("*/legal_programs.json"))
CPU = ("--device", "cpu", "--timeout", "30")
PAIR = (Group((0, 1)),)
THREE = (Group((0, 1, 2)), Group((0, 1)), Group((1, 2)))


def run(file: Path, world_size: int, *more: str, plant: Callable[[], None] | None = None) -> dict[str, Any]:
    """Run programs on CPU ranks. Return the record."""
    code = legal_programs.main([*CPU, "--world-size", str(world_size), *more, "--json", str(file)], plant)
    record: dict[str, Any] = json.loads(file.read_text())["runs"][-1]
    assert code == bool(record["failures"])
    return record


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("backend", "world_size", "programs"), [("shotcast", 2, 40), ("shotcast", 3, 20), ("gloo", 3, 5)]
)
def test_programs_end_with_the_right_values(tmp_path: Path, backend: str, world_size: int, programs: int) -> None:
    more = "--backend", backend, "--programs", str(programs), "--seed", "1", "--shrink", "30"
    record = run(tmp_path / "runs.json", world_size, *more)
    assert not record["failures"], record["failures"]
    assert record["programs"] == programs
    assert record["steps"] > 8 * programs


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", [2, 3])
def test_thousands_of_programs(tmp_path: Path, world_size: int, seed: int) -> None:
    record = run(tmp_path / "runs.json", world_size, "--programs", "1000", "--seed", str(seed))
    assert not record["failures"], record["failures"]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not enough_gpus(2), reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["shotcast", "nccl"])
def test_programs_on_gpus(tmp_path: Path, backend: str) -> None:
    file = tmp_path / "runs.json"
    command = ["--device", "cuda", "--world-size", "2", "--backend", backend, "--programs", "200", "--seed", "1"]
    assert legal_programs.main([*command, "--json", str(file)]) == 0, file.read_text()


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.parent.name)
def test_kept_runs_add_up(path: Path, tmp_path: Path) -> None:
    record = json.loads(path.read_text())
    for run in record["runs"]:
        legal_programs.add(tmp_path / "runs.json", run)
    assert json.loads((tmp_path / "runs.json").read_text()) == record


# -- planted faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plant", "kinds", "steps"),
    [
        (targets.wrong_sums, ["wrong"], 1),
        (targets.dropped_waits, ["wrong"], 4),
        pytest.param(targets.swapped_calls, ["wrong", "error", "hang"], 5, marks=pytest.mark.full),
    ],
)
def test_planted_faults_are_found_and_shrunk(
    tmp_path: Path, plant: Callable[[], None], kinds: list[str], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legal_programs, "MOST_FAILURES", 1)
    record = run(tmp_path / "runs.json", 2, "--programs", "200", "--seed", "1", plant=plant)
    (failure,) = record["failures"]
    small = read(failure["program"])
    check(small)
    assert failure["fails_alone"], failure
    assert failure["kind"] in kinds, failure
    assert failure["by_library"] == "gloo ends it"
    assert len(small.steps) <= steps, failure["program"]
    assert any(isinstance(step, Collective) and step.op.startswith("all_reduce") for step in small.steps)


def test_a_printed_program_can_be_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program("cpu", 2, PAIR, (Slot(200),), (Collective("all_reduce", 0, (0,), 200, "sum"),))
    (tmp_path / "program.txt").write_text(program.text())
    more = "--program", str(tmp_path / "program.txt"), "--shrink", "0"
    assert run(tmp_path / "runs.json", 2, *more)["programs"] == 1
    record = run(tmp_path / "runs.json", 2, *more, plant=targets.wrong_sums)
    assert "1 differ, the first at 199" in record["failures"][0]["text"]
    assert json.loads((tmp_path / "runs.json").read_text())["totals"] == {
        "shotcast on cpu x2": {"runs": 2, "programs": 2, "steps": 2, "failed": 1}
    }
    assert "rank 1, program 0" in capsys.readouterr().out


@pytest.mark.full
def test_a_hang_is_ended_and_says_where_it_was(tmp_path: Path) -> None:
    program = Program("cpu", 2, PAIR, (Slot(1),), (Product(16), Collective("barrier"), Product(16)))
    (tmp_path / "program.txt").write_text(program.text())
    more = "--program", str(tmp_path / "program.txt"), "--shrink", "0", "--timeout", "2"
    (failure,) = run(tmp_path / "runs.json", 2, *more, plant=targets.hanging_barriers)["failures"]
    assert failure["kind"] == "hang"
    assert "rank 0, program 0, step 1, Collective(op='barrier'): no word from it" in failure["text"]
    assert "in call\n" in failure["text"], "the stack"


@pytest.mark.parametrize("replays_do_nothing", [False, True])
def test_streams_and_graphs_of_an_emulated_gpu(replays_do_nothing: bool) -> None:
    for replays, wrong in shotcast.spawn(targets.emulated_gpu, 2, 4, 60, replays_do_nothing, timeout_s=200):
        assert replays >= 10
        assert bool(wrong) == replays_do_nothing


# -- what is drawn ----------------------------------------------------------------------------------------------------


def test_all_ranks_draw_the_same_programs() -> None:
    drawn = shotcast.spawn(targets.texts, 2, 5, range(20), "cpu", 3, timeout_s=300)
    assert drawn[0] == drawn[1] == targets.texts(5, range(20), "cpu", 3)
    assert len(set(drawn[0])) == 20


@pytest.mark.every(3)
@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("cpu", 3), ("cpu", 4), ("cuda", 2)])
def test_programs_are_legal_and_of_every_kind(device: str, world_size: int) -> None:
    kinds: collections.Counter[str] = collections.Counter()
    reductions, groups, beside = set(), set(), 0
    least, most = LARGEST, 0
    for number in range(400):
        program = draw(3, number, device, world_size)
        check(program)
        assert read(program.text()) == program
        kinds.update(census(program))
        groups |= set(program.groups)
        least = min(least, *(slot.nbytes for slot in program.slots))
        most = max(most, *(slot.nbytes for slot in program.slots))
        reductions |= {step.reduction for step in every_step(program.steps) if isinstance(step, Collective)}
        beside += replays_beside_calls(program)
        no_slot_is_touched_under_way(program)
    wanted = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven", "broadcast", "reduce"}
    wanted |= {"gather", "scatter", "all_gather_list", "barrier", "messages alone", "messages batch", "wait", "fill"}
    wanted |= {"all_reduce_coalesced", "all_gather_coalesced", "reduce_scatter_coalesced", "asynchronous"}
    wanted |= {"shorten", "product", "hostsleep"} | (
        {"streamsleep", "capture", "replay"} if device == "cuda" else set()
    )
    assert set(kinds) == wanted
    assert min(kinds.values()) > 20
    assert reductions == {"", *REDUCTIONS[device]}
    assert len(groups) >= {2: 4, 3: 7, 4: 14}[world_size]
    assert least <= 8
    assert LARGEST >= most > (1 << 24 if device == "cuda" else 1 << 19)
    assert (beside > 10) == (device == "cuda")


def replays_beside_calls(program: Program) -> int:
    """Return how many replays begin while a call of a group of the graph is under way."""
    found, under_way = 0, dict[int, int]()
    graphs: dict[int, set[int]] = {}
    for step in program.steps:
        if isinstance(step, Collective | Messages) and step.label:
            under_way[step.label] = step.group
        elif isinstance(step, Wait):
            under_way.pop(step.label, None)
        elif isinstance(step, Capture):
            graphs[step.graph] = {one.group for one in step.steps if isinstance(one, Collective | Messages)}
        elif isinstance(step, Replay):
            found += bool(graphs[step.graph] & set(under_way.values()))
    return found


def no_slot_is_touched_under_way(program: Program) -> None:
    """Look rank by rank at what no rule may let pass: a slot that is used while a call of that rank has it."""
    for rank in range(program.world_size):
        under_way: dict[int, tuple[int, ...]] = {}
        for step in program.steps:
            if isinstance(step, Wait):
                if step.rank in (-1, rank):
                    under_way.pop(step.label, None)
                continue
            busy = {slot for slots in under_way.values() for slot in slots}
            used = {slot for one in every_step([step]) for slot in getattr(one, "slots", ())}
            used |= {step.slot} if isinstance(step, Fill | Shorten) else set()
            assert not busy & used, (rank, step)
            if isinstance(step, Collective | Messages) and step.label and rank in program.groups[step.group].ranks:
                under_way[step.label] = step.slots


SUM = Collective("all_reduce", 0, (0,), 4, "sum")
STARTED = replace(SUM, label=1)
ILLEGAL: dict[str, tuple[str, tuple[Step, ...]]] = {
    "a call is under way with the slot": ("cpu", (STARTED, Fill(0))),
    "a wait for no call": ("cpu", (STARTED, Wait(1), Wait(1))),
    "a wait of a rank that has none": ("cpu", (STARTED, Wait(1, 0), Wait(1, 0))),
    "a label of two calls": ("cpu", (STARTED, Wait(1), STARTED, Wait(1))),
    "leaves these values open": ("cpu", (Collective("reduce", 0, (0,), 4, "sum"), SUM)),
    "more digits than the dtype has": ("cuda", (Collective("all_reduce", 0, (2,), 4, "sum"),) * 7),
    "the reduction": ("cpu", (replace(SUM, reduction="avg"),)),
    "several dtypes": ("cpu", (Collective("all_gather", 0, (0, 2), 1),)),
    "more than the slot has": ("cpu", (replace(SUM, elements=9),)),
    "leaves a call": ("cuda", (Capture(1, (STARTED,)),)),
    "or waits for another's": ("cuda", (STARTED, Capture(1, (Wait(1),)))),
    "a barrier that is captured": ("cuda", (Capture(1, (Collective("barrier"),)),)),
    "a host sleeps in a graph": ("cuda", (Capture(1, (HostSleep(0, 1.0),)),)),
    "a replay of no graph": ("cuda", (Replay(1),)),
    "a graph in a graph, or without a GPU": ("cpu", (Capture(1, (SUM,)),)),
    "there is no such stream": ("cpu", (replace(SUM, stream=1),)),
    "messages between the same ranks": ("cpu", (Messages("batch", ((0, 1), (0, 1)), 0, (0, 1), 2),)),
    "the form of messages": ("cpu", (Messages("alone", ((0, 1), (1, 0)), 0, (0, 1), 2),)),
    "a wrong rank": ("cpu", (Messages("alone", ((0, 0),), 0, (0, 1), 2),)),
}


@pytest.mark.parametrize("why", ILLEGAL)
def test_rules_refuse(why: str) -> None:
    device, steps = ILLEGAL[why]
    slots = Slot(4), Slot(8), Slot(8, "bfloat16")
    with pytest.raises(IllegalError, match=why):
        check(Program(device, 2, PAIR, slots, steps))


def test_rules_refuse_ranks_and_groups_that_a_gpu_has_no_room_for() -> None:
    left_out = Messages("batch", ((0, 1),), 0, (0, 1), 1)
    with pytest.raises(IllegalError, match="a batch that leaves ranks out"):
        check(Program("cuda", 3, THREE, (Slot(4), Slot(4)), (left_out,)))
    check(Program("cpu", 3, THREE, (Slot(4), Slot(4)), (left_out,)))
    groups = tuple(Group((0, 1), copy) for copy in range(5))
    calls = tuple(Collective("all_reduce", g, (g,), 4, "sum", label=g + 1) for g in range(5))
    with pytest.raises(IllegalError, match="too many groups"):
        check(Program("cuda", 2, groups, (Slot(4),) * 5, calls))
    check(Program("cuda", 2, groups, (Slot(4),) * 5, (*calls[:4], Wait(1), calls[4])))
    message = Messages("batch", ((0, 1), (1, 0)), 0, (3, 4), 2, label=9)
    check(Program("cuda", 2, groups, (Slot(4),) * 5, (*calls[:3], message)))
    with pytest.raises(IllegalError, match="too many groups"):
        check(Program("cuda", 2, groups, (Slot(4),) * 6, (*calls[:3], replace(message, slots=(4, 5)), calls[3])))


def test_expected_values_by_hand() -> None:
    steps = (
        Collective("all_reduce", 1, (0,), 2, "sum", keep=True),
        Collective("all_gather", 0, (0, 1), 1, keep=True),
        Messages("batch", ((2, 0), (0, 2)), 0, (1, 2), 1, keep=True),
    )
    program = Program("cpu", 3, THREE, (Slot(2), Slot(3), Slot(3)), steps)
    # the first values of slot s on rank r: (3i + 2r + s) mod 5
    first, _, third = (Expected(program, rank, torch.device("cpu")).kept for rank in range(3))
    assert [x.tolist() for x in first if x is not None] == [[2.0, 3.0], [2.0, 2.0, 4.0], [2.0, 0.0, 2.0]]
    assert [x.tolist() for x in third if x is not None] == [[2.0, 2.0, 4.0], [4.0, 4.0, 2.0]]


def test_shrinking_keeps_what_matters() -> None:
    program = next(
        one for number in range(100) if census(one := draw(9, number, "cuda", 2)).get("replay", 0) > 1 < len(one.groups)
    )

    def fails(candidate: Program) -> bool:
        check(candidate)
        return "replay" in census(candidate)

    small = shrink(program, fails, 20)
    assert [type(step) for step in small.steps] == [Capture, Replay]
    assert len(small.groups) == len(small.slots) == 1
    assert small.slots[0].elements <= 2
