"""All-reduce over hosts that reach each other by puts alone, by the GPUs' kernels in the interpreter.

The network's adapter is emulated (``emulated_puts``): it carries words late and in any order.
"""

from __future__ import annotations

from typing import Any

import pytest
from interpreter_targets import with_late_programs
from node_kernel_targets import KINDS, changing_sizes, failures, values, wrapping_epochs
from put_targets import (
    after_reset,
    bytes_put,
    heard_while_idle,
    killed,
    reset_without_a_farewell,
    through_a_communicator,
    with_headers_late,
    with_one_generation_of_staging,
    with_puts,
    wrong_sums,
)
from test_node_kernels import cases

import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast import wire
from shotcast.collectives.registry import registered


def interpreted(fn: Any, nodes: int, local: int, *args: Any, **kwargs: Any) -> list[Any]:
    return interpret(fn, nodes * local, *args, env=GPU_COLLECTIVES, **kwargs)


@pytest.mark.parametrize(
    ("nodes", "local", "each", "longest_s"),
    [
        pytest.param(2, 2, 1, 0.001, marks=pytest.mark.full),
        *(
            pytest.param(nodes, local, 3, longest_s, marks=pytest.mark.full)
            for nodes, local in ((2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (5, 1))
            for longest_s in (0.0, 0.003)
        ),
        pytest.param(3, 3, 1, 0.001, marks=pytest.mark.full),  # more ranks than a node may have
    ],
)
def test_sums_are_those_of_the_tree(nodes: int, local: int, each: int, longest_s: float) -> None:
    made = cases(nodes, local, each)
    done = interpreted(with_puts, nodes, local, with_late_programs, longest_s, values, nodes, made)
    assert done == [len(made)] * (nodes * local)


@pytest.mark.parametrize(
    ("nodes", "local", "calls"),
    [pytest.param(*shape, 200, marks=pytest.mark.full) for shape in ((2, 1), (3, 1), (2, 2))],
)
def test_sizes_and_kinds_may_change_from_call_to_call(nodes: int, local: int, calls: int) -> None:
    """Words that a put still reads stay as they were, also while the calls after it are under way."""
    interpreted(with_puts, nodes, local, changing_sizes, 0.003, nodes, calls)


@pytest.mark.full
@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=pytest.mark.full)])
def test_what_is_put_is_what_the_cost_model_says(nodes: int) -> None:
    """Nothing passes beside the words of sums and results: twice a 16-bit message where sums are float32, or once."""
    nbytes, found = 16 << 10, interpreted(bytes_put, nodes, 1, nodes, 16 << 10)
    for name in found[0]:
        algorithm, itemsize = name.split()
        work = registered()[algorithm].forms[wire.Op.ALL_REDUCE].work(nbytes, wire.NodeShape(nodes, 1), int(itemsize))
        assert sum(each[name] for each in found) == nodes * (work.network_sent + work.spread_sent), name


@pytest.mark.full
def test_one_generation_of_staging_is_too_few() -> None:
    """A put of a call before would carry words of the next."""
    right = (with_headers_late, 0.05, wrong_sums, 2, 12)
    wrong = (with_headers_late, 0.05, with_one_generation_of_staging, wrong_sums, 2, 12)
    assert interpreted(with_puts, 2, 1, *right) == [0, 0]
    assert max(interpreted(with_puts, 2, 1, *wrong)) > 0


@pytest.mark.full
def test_epochs_across_borders() -> None:
    assert interpreted(with_puts, 2, 1, wrapping_epochs, 0.001, 2)[0] > 1 << 32


@pytest.mark.timing
@pytest.mark.parametrize(
    ("nodes", "local", "kind", "fault"),
    [
        pytest.param(*shape, kind, fault, marks=pytest.mark.full)
        for shape, kind in zip(((2, 2), (3, 1), (2, 3)), KINDS, strict=True)
        for fault in ("late", "silent", "differs")
    ],
)
def test_faults_are_named_on_all_hosts(nodes: int, local: int, kind: str, fault: str) -> None:
    victim = nodes * local - 1
    found = interpreted(with_puts, nodes, local, failures, 0.001, nodes, kind, fault, victim)
    for rank, (error, nan) in enumerate(found):
        if fault == "differs":
            assert (error.kind, bool(error.ranks)) == (wire.MISMATCH, True)
        elif rank != victim:
            assert (error.kind, error.ranks) == (wire.TIMEOUT, (victim,)), (rank, error)
            assert nan


@pytest.mark.full
@pytest.mark.timing
def test_calls_go_on_after_a_reset() -> None:
    for rank, (fault, right) in enumerate(interpreted(after_reset, 2, 1, 2)):
        assert right
        if rank == 0:
            assert (fault.kind, fault.ranks) == (wire.TIMEOUT, (1,))


def test_a_connection_that_ends_in_a_reset_is_no_rank_that_does() -> None:
    """A farewell may be overtaken by the end of its connection."""
    assert interpreted(reset_without_a_farewell, 2, 1, 2) == [([], True)] * 2


@pytest.mark.timing
def test_an_idle_rank_hears_of_a_fault() -> None:
    assert all(0.4 < took < 60 for took in interpreted(heard_while_idle, 2, 1, 2))


@pytest.mark.timing
def test_a_killed_rank_of_another_host_is_named_at_once() -> None:
    results = interpreted(killed, 2, 1, 2, fresh=True, return_exceptions=True)
    assert isinstance(results[-1], shotcast.RankFailed)
    for fault, took in results[:-1]:
        assert (fault.kind, fault.ranks) == (wire.DEAD, (1,))
        assert took < 60  # of 300


@pytest.mark.full
def test_a_communicator_of_hosts_that_put() -> None:
    """Sums are by puts; whatever else crosses nodes is the library's, after the headers were compared."""
    for own, explained, gathered in interpreted(through_a_communicator, 2, 1, 2):
        assert set(own) == set(KINDS)
        assert "nvrar" in explained
        assert "vendor" in gathered
