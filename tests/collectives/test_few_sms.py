"""Calls that keep to a number of SMs: in Triton's interpreter on CPU ranks, and how they are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from few_sms_targets import (
    OTHERS,
    absent,
    across_epochs,
    arguments,
    cases,
    many_chunks,
    mismatched,
    stops_between_chunks,
    stops_in_place,
)
from hypothesis import given
from hypothesis import strategies as st
from test_select import make_topology, table

import shared_ranks
import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.collectives.algorithm import CollectiveProblem, Topology
from shotcast.collectives.choice.candidates import (
    candidates,
    capacity,
    launch_shape,
    launch_unsupported_reason,
    unsupported_reason,
)
from shotcast.collectives.choice.select import choose, predicted_us
from shotcast.errors import ConfigError
from shotcast.transport.triton import GPUS, layout
from shotcast.wire import MAX_SMS, REDUCIBLE, LaunchShape, Op

FLOATS = [torch.float32, torch.bfloat16]
OPS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BROADCAST)


def interpreted(fn: Any, world_size: int, *args: Any, **options: Any) -> list[Any]:
    return interpret(fn, world_size, *args, env=GPU_COLLECTIVES, **options)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "counts"),
    [(2, [0, 333]), pytest.param(3, [1030], marks=pytest.mark.full), pytest.param(6, [1, 600], marks=pytest.mark.full)],
)
def test_calls_have_the_bits_of_the_contract(world_size: int, counts: list[int]) -> None:
    """Odd sizes and addresses, in place and not, with other calls between and random stragglers."""
    dtypes = [*FLOATS, *OTHERS[: 2 if world_size == 2 else 1]]
    done = interpreted(cases, world_size, "cpu", counts, [1, 2, 40], 1 << 16, dtypes)
    assert done == [len(counts) * (6 * 2 + 4 * (len(dtypes) - 2))] * world_size


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_all_calls_have_the_bits_of_the_contract(world_size: int) -> None:
    dtypes = [*FLOATS, torch.float16, *OTHERS]
    interpreted(cases, world_size, "cpu", [0, 1, 5, 64, 333, 4099], [1, 2, 16], 1 << 18, dtypes, timeout_s=900)


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_places_of_the_window_are_used_again(world_size: int) -> None:
    """A program sends up to a dozen chunks a call, where it has three places, and the ranks get steps apart."""
    assert interpreted(many_chunks, world_size, "cpu", 700, (2, 64, 1, 32), 6, fresh=True) == [6] * world_size


@pytest.mark.full
@pytest.mark.long
def test_progress_goes_on_where_its_numbers_change_sign() -> None:
    assert min(interpreted(across_epochs, 2, "cpu")) > 1 << 44


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_ranks_that_give_other_numbers_of_sms_differ() -> None:
    assert interpreted(mismatched, 2, "cpu") == [("CollectiveMismatch", (1,), ("launch",))] * 2


@pytest.mark.timing
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_absent_rank_is_named(killed: bool) -> None:
    timeout_s = 600.0 if killed else 4.0
    options = {"fresh": True, "timeout_s": 300, "return_exceptions": True}
    for outcome in interpreted(absent, 3, "cpu", 2, timeout_s, killed, **options)[:2]:
        assert isinstance(outcome["error"], shotcast.CollectiveTimeout), outcome
        assert (outcome["error"].missing, outcome["error"].op) == ((2,), "all_reduce")
        assert outcome["error"].reason == ("dead" if killed else "late")
        assert outcome["nan"]
        assert isinstance(outcome["again"], shotcast.CollectiveTimeout)
        assert outcome["took"] < 60


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize(("killed", "timeout_s"), [(False, 4.0), (True, 600.0)], ids=["stopped", "killed"])
def test_rank_that_stops_between_chunks_is_named(killed: bool, timeout_s: float) -> None:
    """The others, which wait for it, have done as many steps as each other. Nobody waits for one that has ended."""
    options = {"fresh": True, "timeout_s": 300, "return_exceptions": True}
    for rank, error in enumerate(interpreted(stops_between_chunks, 3, 1, 2, timeout_s, killed, **options)):
        if rank != 1:
            assert isinstance(error, shotcast.CollectiveTimeout), error
            assert (error.missing, error.reason) == ((1,), "dead" if killed else "late")


@pytest.mark.full
@pytest.mark.timing
def test_sums_that_may_not_have_come_into_mapped_memory_are_nan() -> None:
    """Nothing is read beyond the tensor, where no memory may be."""
    options = {"fresh": True, "timeout_s": 300, "return_exceptions": True}
    error, result, ends = interpreted(stops_in_place, 2, 1, 4.0, **options)[0]
    assert isinstance(error, shotcast.CollectiveTimeout), error
    assert error.missing == (1,)
    assert (result[:10_004] == 2.0).all(), "the slice of this rank"
    assert result[10_004:].isnan().all()
    assert max(ends) == result.nbytes


def test_numbers_that_are_no_sms_are_refused_and_cpu_ranks_ignore_others() -> None:
    shared_ranks.run(arguments, 2, timeout_s=300)


# -- choice -----------------------------------------------------------------------------------------------------------


def problem(op: Op = Op.ALL_REDUCE, nbytes: int = 1 << 26, sms: int = 16, **fields: Any) -> CollectiveProblem:
    topology = fields.pop("topology", None) or make_topology("triton", 4, 64 << 20)
    return CollectiveProblem(op, nbytes, fields.pop("dtype", "bfloat16"), topology, sms=sms, **fields)


def legal(case: CollectiveProblem) -> list[str]:
    return [candidate.algorithm for candidate in candidates(case)]


@pytest.mark.parametrize("op", OPS)
def test_few_sms_serve_where_a_number_is_given(op: Op) -> None:
    assert legal(problem(op)) == ["few_sms", "vendor"]
    assert "few_sms" not in legal(problem(op, sms=0))
    assert "sms" in unsupported_reason(problem(op, sms=0), "few_sms")
    assert "does not keep to a number of SMs" in unsupported_reason(problem(op), "one_shot")
    for sms in (32, 4):
        choice = choose(problem(op, sms=sms), "auto", "auto", ())
        assert (choice.candidate.algorithm, choice.source) == ("few_sms", "cost model")
        assert choice.candidate.launch.programs == sms


def test_the_library_serves_what_few_sms_cannot() -> None:
    choice = choose(problem(dtype="float8_e4m3fn"), "auto", "auto", ())
    assert choice.candidate.algorithm == "vendor"
    assert "native kernels have no sum of float8_e4m3fn" in choice.reason
    assert legal(problem(dtype="float64", reduction="max")) == ["few_sms", "vendor"]
    assert legal(problem(Op.REDUCE)) == ["vendor"]
    with pytest.raises(ConfigError, match=r"two_shot cannot serve .*: it does not keep to a number of SMs"):
        choose(problem(), "two_shot", "auto", ())


@pytest.mark.parametrize(
    ("programs", "chunk_bytes", "why"),
    [
        (16, 128 << 10, "16 programs with chunks of 131072 bytes take 33554432 bytes of a window of 16777216"),
        (1, 16, "1 programs with chunks of 16 bytes take 1048576 steps"),
    ],
)
def test_a_row_whose_launch_has_no_room_is_passed_over(programs: int, chunk_bytes: int, why: str) -> None:
    launch = {"programs": programs, "block_words": 2048, "num_warps": 16, "chunk_bytes": chunk_bytes}
    rows = table([None, "few_sms", launch], op="all_gather@16")
    choice = choose(problem(Op.ALL_GATHER, dtype="float32"), "auto", "auto", [("user table", rows)])
    assert choice.source == "cost model"
    assert f"but {why}" in choice.reason
    fitting = table([None, "few_sms", launch | {"programs": 4, "chunk_bytes": 4096}], op="all_gather@16")
    assert choose(problem(Op.ALL_GATHER, dtype="float32"), "auto", "auto", [("user table", fitting)]).entry


def test_the_library_serves_a_message_of_too_many_steps() -> None:
    case = problem(nbytes=1 << 32, topology=make_topology("triton", 8, 1))
    assert "steps" in unsupported_reason(case, "few_sms")
    assert choose(case, "auto", "auto", ()).candidate.algorithm == "vendor"


@pytest.mark.parametrize("chunk_bytes", [0, 8, 24, -16])
def test_a_launch_without_whole_chunks_is_refused(chunk_bytes: int) -> None:
    shape = LaunchShape(8, 2048, 16, chunk_bytes)
    why = launch_unsupported_reason(GPUS, make_topology("triton", 4, 64 << 20).algorithms["few_sms"], shape)
    assert why == f"chunk_bytes is a multiple of 16 from 16 up, not {chunk_bytes}"


def test_a_table_has_rows_for_numbers_of_sms() -> None:
    """A call takes the rows of the next larger number; rows without one are not for it."""
    rows = table(
        [None, "few_sms", {"programs": 8, "block_words": 2048, "num_warps": 16, "chunk_bytes": 8192}], op="all_reduce@8"
    )
    others = table([None, "vendor", None], op="all_reduce@32")
    plain = table([None, "two_shot", None])
    tables = (("user table", plain), ("user table", rows), ("user table", others))
    case = problem(dtype="float32")
    for sms, programs in ((4, 4), (8, 8)):
        choice = choose(dataclasses.replace(case, sms=sms), "auto", "auto", tables)
        assert (choice.candidate.algorithm, choice.candidate.launch.programs) == ("few_sms", programs)
        assert choice.entry == (1, ("eager", "all_reduce@8", "float32"))
    assert choose(dataclasses.replace(case, sms=20), "auto", "auto", tables).candidate.algorithm == "vendor"
    assert choose(dataclasses.replace(case, sms=33), "auto", "auto", tables).source == "cost model"
    assert choose(dataclasses.replace(case, sms=0), "auto", "auto", tables).candidate.algorithm == "two_shot"
    for wrong in ("all_reduce@0", "all_reduce@x", f"all_reduce@{MAX_SMS + 1}", "all_reduce@"):
        with pytest.raises(ConfigError, match="no operation"):
            table([None, "vendor", None], op=wrong)


def test_fewer_sms_take_longer_by_the_model() -> None:
    topology = make_topology("triton", 2, 64 << 20)
    times = [predicted_us(topology, Op.ALL_REDUCE, "bfloat16", 448 << 20, "few_sms", sms) for sms in (4, 8, 16, 64)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(2 * times[1], rel=0.01), "the SMs are the limit"
    assert times[-1] == predicted_us(topology, Op.ALL_REDUCE, "bfloat16", 448 << 20, "few_sms"), "the link is"


topologies = st.builds(
    make_topology,
    kernels=st.sampled_from(["triton", "interpreter"]),
    world_size=st.integers(2, 8),
    max_bytes=st.integers(1, 512 << 20),
)


@given(
    topology=topologies,
    op=st.sampled_from(OPS),
    nbytes=st.integers(0, 1 << 33),
    sms=st.integers(1, MAX_SMS),
    dtype=st.sampled_from([*REDUCIBLE, "int64"]),
    uneven=st.booleans(),
)
def test_launches_fit_into_the_window(
    topology: Topology, op: Op, nbytes: int, sms: int, dtype: str, uneven: bool
) -> None:
    world_size = topology.world_size
    sizes = (nbytes // 8, *(0,) * (world_size - 1)) if uneven and op is Op.ALL_GATHER else ()
    case = CollectiveProblem(op, nbytes, dtype, topology, sizes=sizes, sms=sms)
    shape = launch_shape(case, "few_sms")
    assert 1 <= shape.programs <= sms
    assert not launch_unsupported_reason(topology.transport, topology.algorithms["few_sms"], shape)
    where = layout.WorkspaceLayout.for_messages(capacity(case, "few_sms"))
    assert shape.chunk_bytes >= 16
    assert shape.chunk_bytes % 16 == 0
    form = topology.algorithms["few_sms"].forms[op]
    assert form.launch_unsupported_reason(case, shape) == form.unsupported_reason(case)
    short = topology.max_bytes < 1 << 20 or topology.transport.serial  # 4 KiB a step where there is no GPU
    assert not form.unsupported_reason(case) or short, "only of a small window, or of short steps"
    used = shape.programs * layout.places_in_window(op) * world_size * shape.chunk_bytes
    assert used <= where.window_quads * layout.QUAD
    if topology.max_bytes >= 8 << 20 and nbytes >= 64 << 20 and topology.transport.name == "triton" and not sizes:
        assert shape.programs == sms, "a large message has work for all"
        assert used >= where.window_quads * layout.QUAD / 4 or shape.chunk_bytes == 128 << 10
