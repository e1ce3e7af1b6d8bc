"""Workspaces that begin small and grow: the same results, errors on all ranks, and no address that ever changes."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import growth_targets as targets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_interpreter import interpreted
from test_select import make_topology, problems

from shotcast import wire
from shotcast.collectives.algorithm import CollectiveProblem
from shotcast.collectives.choice.candidates import capacity, unsupported_reason
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.registry import registered
from shotcast.errors import ConfigError
from shotcast.transport.triton.layout import FIRST_CAPACITY, WorkspaceLayout, capacities
from shotcast.wire import Op

FIRST, LARGEST = targets.FIRST, targets.LARGEST

# -- sizes ------------------------------------------------------------------------------------------------------------


def test_rooms_from_small_to_the_largest() -> None:
    mib = 1 << 20
    assert capacities(64 * mib) == (8 * mib, 32 * mib, 64 * mib)
    assert capacities(512 * mib) == (8 * mib, 32 * mib, 128 * mib, 512 * mib)
    assert capacities(10 * mib) == (8 * mib, 10 * mib)
    assert capacities(8 * mib) == (8 * mib,)
    assert capacities(100) == (100,)
    assert WorkspaceLayout.for_messages(FIRST_CAPACITY).nbytes < 83 * mib


@given(st.integers(1, 512 << 20))
def test_all_rooms_take_at_most_twice_the_largest(max_bytes: int) -> None:
    sizes = capacities(max_bytes)
    assert sizes[-1] == max_bytes
    assert list(sizes) == sorted(set(sizes))
    assert sum(sizes) <= 2 * max_bytes
    assert sizes[0] <= FIRST_CAPACITY


def test_only_the_first_region_has_mailboxes() -> None:
    first, later = WorkspaceLayout.for_messages(1 << 20), WorkspaceLayout.for_messages(1 << 20, mailboxes=False)
    assert first.nbytes - later.nbytes == 2 << 20
    assert dataclasses.replace(later, nbytes=0).slots_quads == first.slots_quads


@given(problems, st.sampled_from(["triton", "interpreter", "compiled"]))
def test_a_call_needs_the_smallest_room_in_which_it_is_legal(case: CollectiveProblem, kernels: str) -> None:
    case = dataclasses.replace(case, topology=make_topology(kernels, case.topology.world_size, 64 << 20))
    for name, algorithm in registered().items():
        if case.op in algorithm.forms and not unsupported_reason(case, name):
            _check_room(case, name, kernels)


def _check_room(case: CollectiveProblem, name: str, kernels: str) -> None:
    needed = capacity(case, name)
    if kernels == "compiled" or name == "vendor" or case.op in (Op.SEND, Op.RECV, Op.BARRIER):
        assert needed == 0
        return
    chosen = next(size for size in capacities(64 << 20) if size >= needed)
    assert not unsupported_reason(_within(case, chosen), name)
    form = registered()[name].forms[case.op]
    if form.divides:
        cells = case.dtype not in wire.REDUCIBLE  # twice the bytes, in half the room
        assert needed == min(case.nbytes * (4 if cells else 1), 64 << 20)
    else:
        assert all(unsupported_reason(_within(case, size), name) for size in capacities(64 << 20) if size < needed)


def _within(case: CollectiveProblem, max_bytes: int) -> CollectiveProblem:
    return dataclasses.replace(case, topology=dataclasses.replace(case.topology, max_bytes=max_bytes))


# -- growth -----------------------------------------------------------------------------------------------------------


def test_a_capture_cannot_grow_and_says_what_to_do() -> None:
    executor: Any = SimpleNamespace(capacity=10)
    comm: Any = SimpleNamespace(_executor=executor)
    comm._grow = functools.partial(Communicator._grow, comm)
    call: Any = SimpleNamespace(capacity=11, label="shotcast.all_reduce", plan=None, needs={})
    with pytest.raises(ConfigError, match=r"shotcast\.all_reduce needs a larger workspace.*call it once before"):
        Communicator._compile(comm, call, True)
    call.capacity = 10
    Communicator._compile(comm, call, True)


@pytest.mark.long
class TestInterpreted:
    @pytest.mark.full
    def test_a_workspace_is_replaced_by_a_larger_one(self) -> None:
        """The first one stays. The calls are counted on; before a growth, the ranks meet in a call of its own."""
        first, second, third = [FIRST], [FIRST, 4 * FIRST], [FIRST, LARGEST]
        expected = [
            (4, first, 1),
            (FIRST, first, 2),
            (FIRST + 4, second, 4),
            (4, second, 5),
            (4 * FIRST, second, 6),
            (LARGEST, third, 8),
            (2 * FIRST, third, 9),
            (3 * LARGEST, third, 12),
            (8, third, 13),
        ]
        assert interpreted(targets.one_after_the_other, 2) == [expected] * 2

    @pytest.mark.full
    def test_graphs_go_on_in_the_workspace_that_they_were_captured_with(self) -> None:
        expected = [[FIRST], [FIRST, 4 * FIRST], [FIRST, 4 * FIRST, LARGEST]]
        assert interpreted(targets.workspaces_of_graphs, 2) == [expected] * 2

    def test_a_growth_in_inference_mode_serves_all_modes(self) -> None:
        assert interpreted(targets.growth_in_inference_mode, 2) == [[FIRST, LARGEST]] * 2

    @pytest.mark.full
    def test_messages_arrive_across_a_growth(self) -> None:
        interpreted(targets.messages_across_growth, 2)

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("world_size", "calls"),
        [pytest.param(2, 30, marks=pytest.mark.full), (3, 20), pytest.param(4, 300, marks=pytest.mark.full)],
    )
    def test_results_are_right_while_workspaces_grow(self, world_size: int, calls: int) -> None:
        ends = interpreted(targets.calls_that_grow, world_size, calls, 5)
        assert ends == [ends[0]] * world_size
        assert (ends[0][0][0], ends[0][0][-1]) == (FIRST, LARGEST)

    @pytest.mark.full
    @pytest.mark.timing
    def test_an_absent_rank_is_named_by_the_deadline(self) -> None:
        for rank, (op, missing, took) in enumerate(interpreted(targets.absent, 2, 1.0)):
            assert (op, missing) == ("all_reduce", (1,))
            assert took < 3.5 or rank == 1

    @pytest.mark.parametrize("count", [FIRST - 1, 8])
    def test_ranks_that_call_something_else_are_named(self, count: int) -> None:
        """One rank grows for another call, or does not grow at all."""
        for message in interpreted(targets.mismatched, 2, count):
            assert f"all_reduce(float32, {_size(4 * count)}, two_shot" in message
            assert f"all_reduce(float32, {_size(4 * FIRST)}, two_shot" in message

    @pytest.mark.full
    def test_faults_of_larger_workspaces(self) -> None:
        for late, others in interpreted(targets.faults_in_a_larger_workspace, 2, 1.0):
            assert "all_reduce" in late
            for other, nbytes in zip(others, (4 * FIRST + 4, 32), strict=True):
                assert "rank 0: all_reduce(float32, 16 KiB, two_shot" in other
                assert f"rank 1: all_reduce(float32, {_size(nbytes)}, two_shot" in other

    @pytest.mark.full
    def test_one_rank_without_memory_is_an_error_of_all(self) -> None:
        for errors in interpreted(targets.without_memory, 2, 1, fresh=True):
            assert len(errors) == 3
            for error in errors:
                assert "rank 1: not enough shared memory: wanted" in error
                assert "free in" in error

    def test_a_rank_that_fails_before_or_after_is_an_error_of_all_too(self) -> None:
        before = "rank 1: cpu cannot hold a communicator: no room"
        after = "rank 1: cpu cannot hold a workspace: no room"
        assert interpreted(targets.failing_on_one_rank, 2, 1) == [[before, before, after]] * 2

    def test_kernels_multicast_only_if_all_ranks_can(self) -> None:
        """Point of agreement: an executor that went by its own address would store to ranks that never look there."""
        for says, does, candidates in interpreted(targets.multicast_of_one_rank, 2, 1):
            assert (says, does) == (False, False)
            assert "multimem" not in candidates

    @pytest.mark.full
    def test_memory_is_leased_and_given_back(self) -> None:
        for held in interpreted(targets.communicators_with_leases, 4, fresh=True):
            first, *between, last = held
            assert {leased for leased, _ in between} == {first[0]}
            assert max(blocks for _, blocks in between) < 4 * between[0][1]
            assert last == (0, 0)


def _size(nbytes: int) -> str:
    from shotcast.units import format_size

    return format_size(nbytes)
