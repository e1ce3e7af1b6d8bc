"""Calls by copy engines: in Triton's interpreter on CPU ranks, and how they are chosen."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from copy_engine_targets import (
    KINDS,
    absent,
    cases,
    in_place_after_a_fault,
    stopped_by_its_host,
    told_after_the_last_meeting,
)
from hypothesis import given
from hypothesis import strategies as st
from test_select import make_topology

import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.bench.tune import eligible_candidates
from shotcast.collectives.algorithm import CollectiveProblem
from shotcast.collectives.choice.candidates import capacity, launch_shape, launch_shapes, unsupported_reason
from shotcast.collectives.choice.resolver import Resolver
from shotcast.collectives.choice.select import choose
from shotcast.transport.triton import copy_engines
from shotcast.transport.triton.copy_engines import OUT, REGION, CopiedParts
from shotcast.transport.triton.layout import bytes_of_copies, places_of_copies
from shotcast.wire import Op, slice_bytes


def interpreted(fn: Any, world_size: int, *args: Any, **options: Any) -> list[Any]:
    return interpret(fn, world_size, *args, env=GPU_COLLECTIVES, **options)


@pytest.mark.parametrize(
    ("world_size", "counts", "exclusive"),
    [
        (2, [1030], True),
        *(
            pytest.param(*more, marks=pytest.mark.full)
            for more in ((2, [0, 1, 4099], False), (3, [5, 1030], False), (4, [600], True))
        ),
    ],
)
def test_calls_have_the_bits_of_the_contract(world_size: int, counts: list[int], exclusive: bool) -> None:
    """Odd sizes and addresses, in place and not, one round and many, with other calls between and stragglers."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    done = interpreted(cases, world_size, "cpu", counts, [0, 64, 1024], dtypes, exclusive)
    assert done == [len(counts) * (2 * 4 + 2)] * world_size


@pytest.mark.timing
@pytest.mark.parametrize(
    ("meeting", "killed"),
    [(2, False), *(pytest.param(*more, marks=pytest.mark.full) for more in ((0, False), (3, True)))],
)
def test_rank_that_stops_between_steps_is_named(meeting: int, killed: bool) -> None:
    """The others copy what lies in their regions, and make it NaN."""
    timeout_s = 600.0 if killed else 4.0
    options = {"fresh": True, "timeout_s": 300, "return_exceptions": True}
    for rank, outcome in enumerate(interpreted(absent, 2, "cpu", 1, timeout_s, meeting, killed, **options)):
        if rank != 1:
            assert isinstance(outcome["error"], shotcast.CollectiveTimeout), outcome
            assert (outcome["error"].missing, outcome["error"].op) == ((1,), "all_reduce")
            assert outcome["error"].reason == ("dead" if killed else "late")
            assert outcome["nan"]
            assert isinstance(outcome["again"], shotcast.CollectiveTimeout)
            assert outcome["took"] < 60


@pytest.mark.full
@pytest.mark.timing
def test_own_part_of_a_gather_in_place_outlives_a_fault() -> None:
    tensor, error = interpreted(in_place_after_a_fault, 2, fresh=True)[0]
    assert error == "CollectiveTimeout"
    assert (tensor[:3000] == 0).all()
    assert tensor[3000:].isnan().all()


@pytest.mark.parametrize("copies", [0, 1])
def test_rank_that_hears_of_a_fault_after_its_last_meeting_says_so(copies: int) -> None:
    """Copies of another rank may since then lie where this one took its results from.

    What another rank stores may come to some copies of the abort word before it comes to others.
    """
    (result, error), (other, none) = interpreted(told_after_the_last_meeting, 2, copies, fresh=True)
    assert isinstance(error, shotcast.CollectiveTimeout)
    assert error.missing == (1,)
    assert result.isnan().all()
    assert none is None
    assert (other == 2).all()


@pytest.mark.timing
@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.every(4)) for op in KINDS])
def test_a_rank_that_its_host_stopped_spoils_no_result_in_silence(op: Op) -> None:
    """Its next copies go where another rank has yet to take what came before."""
    (right, none), (also_right, error) = interpreted(stopped_by_its_host, 2, op, fresh=True)
    assert right
    assert none is None
    assert also_right or isinstance(error, shotcast.ShotcastError)


# -- choice -----------------------------------------------------------------------------------------------------------


def problem(op: Op, nbytes: int, exclusive: bool = False, **fields: Any) -> CollectiveProblem:
    topology = dataclasses.replace(make_topology("triton", 4, fields.pop("max_bytes", 512 << 20)), exclusive=exclusive)
    return CollectiveProblem(op, nbytes, fields.pop("dtype", "bfloat16"), topology, **fields)


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_large_calls_go_by_copy_engines_where_the_gpu_is_shared(op: Op, mode: str) -> None:
    for nbytes, taken in ((16 << 20, True), (1 << 30, True), ((16 << 20) - 16, False)):
        choice = choose(problem(op, nbytes), "auto", "auto", (), mode)
        assert (choice.candidate.algorithm == "copy_engines") == taken
        assert (choice.source == "sharing") == taken
    assert choose(problem(op, 1 << 30, exclusive=True), "auto", "auto", ()).candidate.algorithm != "copy_engines"
    assert choose(problem(op, 1 << 30), "auto", "vendor", ()).candidate.algorithm == "vendor"
    passed = choose(problem(op, 64 << 20), "auto", "few_sms", ()).reason
    assert "SHOTCAST_ALGORITHM is few_sms, but" in passed
    assert choose(problem(op, 1 << 30), "lossless", "auto", ()).candidate.algorithm == "copy_engines"


@pytest.mark.parametrize("algorithm", ["auto", "lossless", "two_shot"])
@pytest.mark.parametrize("environment", ["auto", "ring"])
def test_calls_that_take_no_sm_go_by_copy_engines_where_they_serve(algorithm: str, environment: str) -> None:
    """An algorithm that the call names, or SHOTCAST_ALGORITHM, comes first."""
    served = problem(Op.ALL_REDUCE, 1 << 20, exclusive=True)
    without = problem(Op.ALL_REDUCE, 1 << 20, exclusive=True, max_bytes=16 << 20)
    resolver = Resolver(served.topology, environment, (), (), None, True)
    free = algorithm != "two_shot" and environment == "auto"
    assert resolver.named(served, algorithm, 0) == ("copy_engines" if free else algorithm)
    assert resolver.named(served, algorithm, None) == algorithm
    assert resolver.named(without, algorithm, 0) == algorithm


def test_tuning_leaves_out_what_tables_may_not_name() -> None:
    for op in KINDS:
        names = [one.algorithm for one in eligible_candidates(problem(op, 1 << 26, exclusive=True), True)]
        assert "copy_engines" not in names
        assert names


def test_other_launches_and_reasons_of_copy_engines() -> None:
    asked = problem(Op.ALL_REDUCE, 1 << 27)
    default = launch_shape(asked, "copy_engines")
    assert default.programs * default.num_warps > 1024
    assert launch_shapes(asked, "copy_engines")[0] == default
    alone = problem(Op.ALL_GATHER, 512 << 20, exclusive=True, max_bytes=32 << 20)
    assert "serves only calls that name it" in choose(alone, "auto", "auto", ()).reason


def test_copy_engines_serve_regions_with_room_and_no_number_of_sms() -> None:
    asked = problem(Op.ALL_REDUCE, 1 << 26)
    assert unsupported_reason(asked, "copy_engines") == ""
    assert capacity(asked, "copy_engines") == 32 << 20
    assert "max_bytes" in unsupported_reason(problem(Op.ALL_REDUCE, 1 << 26, max_bytes=16 << 20), "copy_engines")
    assert "SMs" in unsupported_reason(problem(Op.ALL_REDUCE, 1 << 26, sms=16), "copy_engines")
    assert "512 are the most" in unsupported_reason(problem(Op.ALL_REDUCE, 8 << 30), "copy_engines")
    assert "equal parts" in unsupported_reason(problem(Op.ALL_GATHER, 64, sizes=(8, 8, 8, 8)), "copy_engines")


@given(op=st.sampled_from(KINDS), world_size=st.integers(2, 8), quads=st.integers(0, 2000), chunk=st.integers(1, 40))
def test_places_are_written_again_only_when_all_have_taken_what_was_there(
    op: Op, world_size: int, quads: int, chunk: int
) -> None:
    """All that ranks do in a phase may go on at once. A chunk is read in the phase after the one it was written in."""
    part = 16 * quads
    capacity = 16 * chunk * world_size * places_of_copies(op, -(-quads // chunk))
    regions = tuple(10**9 * rank for rank in range(world_size))
    parts = [CopiedParts(op, part * world_size, part, 16 * chunk, rank, regions) for rank in range(world_size)]
    phases = [list(one.phases()) for one in parts]
    assert len({len(one) for one in phases}) == 1
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    for number, of_ranks in enumerate(zip(*phases, strict=True)):
        for phase in of_ranks:
            for copy in (*phase.early, *phase.late):
                assert copy.target_base == REGION
                assert read.get(copy.target, -1) < number
                assert copy.target % 10**9 + copy.nbytes <= capacity
                written[copy.target] = number
        for rank, phase in enumerate(of_ranks):
            found = [copy.source for copy in phase.taken if copy.source_base == REGION]
            found += [one.came + r * 16 * chunk for one in phase.sums for r in range(world_size) if r != rank]
            for place in found:
                assert written[place] == number - 1
                read[place] = number
    assert written.keys() == read.keys()


@given(op=st.sampled_from(KINDS), world_size=st.integers(2, 8), elements=st.integers(0, 3000), chunk=st.integers(1, 40))
def test_every_byte_of_the_result_is_written_once(op: Op, world_size: int, elements: int, chunk: int) -> None:
    nbytes = 2 * elements * (1 if op is Op.ALL_REDUCE else world_size)
    part = slice_bytes(nbytes, world_size) if op is Op.ALL_REDUCE else nbytes // world_size
    for rank in range(world_size):
        parts = CopiedParts(op, nbytes, part, 16 * chunk, rank, (0,) * world_size)
        spans = []
        for phase in parts.phases():
            spans += [(copy.target, copy.nbytes) for copy in phase.taken if copy.target_base == OUT]
            spans += [(one.out, one.nbytes) for one in phase.sums]
        end = 0
        for start, size in sorted(span for span in spans if span[1]):
            assert start == end
            end += size
        assert end == (part if op is Op.REDUCE_SCATTER else nbytes)


class Recorded:
    """Streams, events and kernels that note what happens before what, in place of those of a GPU."""

    def __init__(self) -> None:
        self.done: dict[int, set[str]] = {1: set(), 2: set()}  # by stream, 2 being the lane's
        self.events: list[set[str]] = []
        self.before: dict[str, set[str]] = {}

    def kernel(self, name: str) -> Any:
        def launch(stream: int, values: Any) -> None:
            self.does(stream, f"{name} {len(self.before)}")

        launch.load = lambda: None  # type: ignore[attr-defined]
        return launch

    def does(self, stream: int, what: str) -> None:
        self.before[what] = set(self.done[stream])
        self.done[stream].add(what)

    def of(self, stream: int) -> Recorded:
        return self

    def after(self, stream: int) -> int:
        self.done[2] |= self.done[stream]
        return 2

    def mark(self) -> int:
        self.events.append(set(self.done[2]))
        return len(self.events) - 1

    def wait(self, stream: int, event: int) -> None:
        self.done[stream] |= self.events[event]


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize("chunk", [16, 64])
def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, op: Op, chunk: int) -> None:
    """Kernels and copies are enqueued by phases; those of one phase wait only for the sums."""
    seen = Recorded()

    def copy(copies: Any, stream: int, x: int, out: int) -> None:
        for one in copies:
            kind = "takes" if one.target_base == OUT else "late" if one.source_base == OUT else "early"
            seen.does(stream, f"{kind} {len(seen.before)}")

    monkeypatch.setattr(copy_engines, "_copy", copy)
    phases = tuple(CopiedParts(op, 128, 64, chunk, 0, (1000, 2000)).phases())
    launches: Any = [seen.kernel(name) for name in ("meets", "sums", "last")]
    lane: Any = seen
    made = copy_engines.CopyEngineCall(phases, launches[:1], launches[1], launches[2], 128, (128, 128), lane)
    made(1, (10**6, 2 * 10**6))
    order = list(seen.before)
    meetings = [what for what in order if what.startswith("meets")]
    assert len(meetings) == len(phases)
    for number, what in enumerate(order):
        earlier = [one for one in order[:number] if one.startswith("meets")]
        assert set(earlier) <= seen.before[what], "what comes after a meeting waits for it"
        if what.startswith(("meets", "last")):
            assert set(order[:number]) <= seen.before[what], "a meeting waits for both streams"
        if what.startswith("late"):
            sums = [one for one in order[:number] if one.startswith("sums")]
            assert set(sums) <= seen.before[what]
        if what.startswith("early"):
            assert all(one.startswith(("meets", "early", "late")) for one in seen.before[what] - before(what, order))


def before(what: str, order: list[str]) -> set[str]:
    """Return what comes before the last meeting before."""
    number = order.index(what)
    last = max(at for at in range(number) if order[at].startswith("meets"))
    return set(order[:last])


@given(op=st.sampled_from(KINDS), nbytes=st.integers(0, 1 << 33), exclusive=st.booleans())
def test_chunks_have_room(op: Op, nbytes: int, exclusive: bool) -> None:
    chunk = launch_shape(problem(op, nbytes, exclusive), "copy_engines").chunk_bytes
    chunks = max(1, math.ceil(nbytes / 4 / chunk))
    assert chunk > 0
    assert chunk % 16 == 0
    capacity = bytes_of_copies(exclusive)
    assert 4 * chunk * places_of_copies(op, chunks) <= capacity
    assert chunks == 1 or nbytes > capacity // places_of_copies(op, 1), "a message that has room passes at once"
