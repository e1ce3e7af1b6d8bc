"""Fused operations on real GPUs: values, bits, graphs, stragglers, faults. Run with ``pytest -m gpu``."""

from __future__ import annotations

import itertools

import fused_targets as targets
import pytest
import torch
from fused_targets import FUSED, Case, Stopped
from workers import SIGNALS

import shotcast
from shotcast.wire import Op

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 3, 4, 8) if n <= torch.cuda.device_count()]
ROWS, LENGTHS = [0, 1, 3, 8, 33], [64, 576, 1000, 4096, 8192]
"""Lengths of a row: less than a tile, some tiles and a part of one, as many as a warp has lanes."""


@pytest.mark.parametrize("op", FUSED, ids=lambda op: op.label)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_values(op: Op, world_size: int) -> None:
    kinds = itertools.cycle(["bfloat16", "float16", "float32"])
    listed = [Case(next(kinds), rows, hidden, rows % 2) for rows, hidden in itertools.product(ROWS, LENGTHS)]
    listed += [Case("bfloat16", 512, 8192)]
    assert min(shotcast.spawn(targets.cases, world_size, "cuda", listed, [op], 32 << 20, timeout_s=380)) > 0


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_do_not_depend_on_algorithm_or_batch(world_size: int) -> None:
    results = shotcast.spawn(targets.bits_of_every_algorithm, world_size, "cuda", [64, 1000, 8192], timeout_s=300)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_results_in_given_tensors(world_size: int) -> None:
    for shift in (0, 1):
        shotcast.spawn(targets.into_given_tensors, world_size, "cuda", "bfloat16", 5, 4104, shift, timeout_s=200)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_changing_calls_with_stragglers(world_size: int) -> None:
    shotcast.spawn(targets.changing_calls, world_size, "cuda", 1500, 12, [64, 1000, 8192], 7, timeout_s=380)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_replay_on_changed_inputs(world_size: int) -> None:
    shotcast.spawn(targets.graphs, world_size, 60, 4096, timeout_s=300)


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [
        (Op.ALL_REDUCE_RMS_NORM, "one_shot"),
        (Op.ALL_REDUCE_RMS_NORM, "two_shot"),
        (Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER, "two_shot"),
    ],
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_killed_rank(op: Op, algorithm: str, world_size: int) -> None:
    victim = world_size - 1
    results = shotcast.spawn(
        targets.stopped,
        world_size,
        "cuda",
        op,
        algorithm,
        victim,
        SIGNALS["killed"],
        2.0,
        timeout_s=30,
        return_exceptions=True,
    )
    for rank, said in enumerate(results):
        if rank != victim:
            assert isinstance(said, Stopped), said
            assert isinstance(said.error, shotcast.CollectiveTimeout), said
            assert said.error.missing == (victim,)
