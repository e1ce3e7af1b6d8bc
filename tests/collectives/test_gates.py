"""One warp waits in front of a call of a communicator that is not exclusive, on the terms of every call."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gate_targets as targets
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from test_interpreter import interpreted

from shotcast.collectives.growth import Growths


@pytest.mark.full
def test_a_grid_begins_when_every_rank_has_come() -> None:
    assert interpreted(targets.late_rank, 2, False)[0] > 0.4


def test_the_grid_of_an_exclusive_communicator_begins_at_once() -> None:
    interpreted(targets.late_rank, 2, True)  # else rank 1 would never come


def test_communicators_are_counted_by_kind() -> None:
    assert interpreted(targets.kinds, 2) == [[(1, 0), (1, 1), (0, 1), (0, 0)]] * 2


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (3, 5))])
def test_calls_with_stragglers_count_once(world_size: int) -> None:
    assert interpreted(targets.calls_with_stragglers, world_size, 40) == [40] * world_size


@pytest.mark.timing
def test_an_absent_rank_is_named_by_the_deadline() -> None:
    said, took = interpreted(targets.absent, 2, 2.0)[0]
    assert "all_reduce" in said
    assert 1.9 < took < 62


@pytest.mark.full
def test_a_gate_finds_calls_that_differ() -> None:
    assert all("all_reduce" in said for said in interpreted(targets.differing, 2))


def test_the_first_call_loads_the_kernels_of_all_sizes() -> None:
    assert interpreted(targets.forms_of_sizes, 2) == [0, 0]


@pytest.mark.full
def test_what_fits_serves_calls_when_ranks_are_not_there() -> None:
    """The library would first connect ranks, and their hosts would wait for each other."""
    assert interpreted(targets.copies_with_late_ranks, 2) == [[("few_sms", 0)] * 3] * 2


def test_workspaces_grow_when_all_ranks_are_there() -> None:
    assert interpreted(targets.growth_with_late_ranks, 2) == [[(1, 1), (2, 2), (2, 2)]] * 2


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.03, 0.09, 0.11]), min_size=2, max_size=4), st.integers(1, 5))
def test_ranks_decide_alike_on_growth(delays: list[float], calls: int) -> None:
    """Whoever is late, and by how much: all ranks come to one decision in each call."""
    store, ready = dist.HashStore(), threading.Barrier(len(delays))

    def decisions(delay: float) -> list[bool]:
        growths, found = Growths(store, len(delays), 0.1), []
        for _ in range(calls):
            ready.wait()
            time.sleep(delay)
            found.append(growths.all_there())
        return found

    with ThreadPoolExecutor(len(delays)) as ranks:
        found = list(ranks.map(decisions, delays))
    assert all(one == found[0] for one in found)
    assert not any(grows for number, grows in enumerate(found[0], 1) if number & (number - 1))
    if max(delays) == 0.0:
        assert found[0][0]
