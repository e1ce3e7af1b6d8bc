"""The kernel for an all_to_all of parts of any sizes: in the interpreter, compiled, and on GPUs (``pytest -m gpu``)."""

from __future__ import annotations

import pytest
import uneven_targets as targets

import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.collectives.rank_device import enough_gpus

GPU_WORLD_SIZES = [n for n in (2, 3, 4, 8) if enough_gpus(n)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "shift", "mosts"),
    [(2, 1, (90,)), *(pytest.param(n, n % 2, (1, 40, 150), marks=pytest.mark.full) for n in range(2, 9))],
)
def test_parts_of_any_sizes(world_size: int, shift: int, mosts: tuple[int, ...]) -> None:
    """Exchange parts of the heads alone, and chunks that pass through each place of the window several times."""
    done = interpret(targets.exchanges, world_size, "cpu", 1 << 12, mosts, shift, env=GPU_COLLECTIVES)
    assert done == [len(mosts) * len(targets.DTYPES)] * world_size


@pytest.mark.full
def test_sizes_that_differ() -> None:
    found = interpret(targets.differing_sizes, 3, "cpu", env=GPU_COLLECTIVES)
    check_differing(found)


def check_differing(found: list[list[tuple[str, tuple[int, ...], tuple[str, ...]]]]) -> None:
    for rank, told in enumerate(found):
        assert [differing for _, differing, _ in told] == [(0,)] * 4
        assert {fields for _, _, fields in told} == {("sizes",)}
        if rank == 1:
            assert "rank 0: sends 3 of float32 to rank 1; rank 1: expects 2 from rank 0" in told[0][0]
            assert "rank 0: sends 9000 of float32 to rank 1; rank 1: expects 2 from rank 0" in told[3][0]


@pytest.mark.parametrize("algorithm", ["one_shot", "vendor"])
def test_sizes_are_no_calls_of_their_own(algorithm: str) -> None:
    for remembered, _ in shotcast.spawn(targets.many_sizes, 2, algorithm, 20, timeout_s=300):
        assert remembered == 1


@pytest.mark.full
def test_sizes_are_arguments_of_kernels() -> None:
    for remembered, _ in interpret(targets.many_sizes, 2, "one_shot", 1, env=GPU_COLLECTIVES):
        assert remembered == 1


@pytest.mark.timing
def test_new_sizes_take_at_most_twice_as_long() -> None:
    for _, (same, new) in shotcast.spawn(targets.many_sizes, 2, "one_shot", 500, timeout_s=300):
        assert new < 2 * same


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)
class TestOnGpus:
    @pytest.mark.parametrize("shift", [0, 1])
    def test_parts_of_any_sizes(self, world_size: int, shift: int) -> None:
        shotcast.spawn(targets.exchanges, world_size, "cuda", 64 << 20, (1, 5000, 3_000_000), shift, timeout_s=200)

    def test_sizes_that_differ(self, world_size: int) -> None:
        check_differing(shotcast.spawn(targets.differing_sizes, world_size, "cuda", timeout_s=200))

    def test_new_sizes_take_the_host_at_most_twice_as_long(self, world_size: int) -> None:
        for remembered, (same, new) in shotcast.spawn(targets.host_times, world_size, timeout_s=200):
            assert remembered == 2, "with the barrier"
            assert new < 2 * same

    @pytest.mark.parametrize("most", [60, 300_000])
    def test_graphs(self, world_size: int, most: int) -> None:
        shotcast.spawn(targets.captured, world_size, most, timeout_s=200)
