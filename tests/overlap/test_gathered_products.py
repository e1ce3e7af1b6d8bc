"""All-gather and product in one: bits, waits, and the choice of a form, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gathered_targets as targets
import pytest
import torch
from gathered_targets import SMALL, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.collectives import registry
from shotcast.collectives.algorithm import CollectiveProblem, Topology
from shotcast.collectives.choice.candidates import candidates
from shotcast.collectives.choice.select import choose
from shotcast.hardware import catalog
from shotcast.hardware.nodes import NodeLayout
from shotcast.kernels.triton import gemm
from shotcast.kernels.triton.gemm import GemmConfig
from shotcast.launcher.spawn import spawn
from shotcast.overlap import gathered_products
from shotcast.transport.triton import GPUS
from shotcast.transport.triton.gather_matmul import call_of
from shotcast.wire import LaunchShape, Op

BF16, FP16 = torch.bfloat16, torch.float16
PERSISTENT = GemmConfig(16, 32, 16, 2, 4, group=3, persistent=True)
CASES = [
    Case(32, 48, (64,), BF16, SMALL, 4),  # tiles divide a shard
    Case(20, 40, (40, 8), FP16, SMALL, 1),  # a tile has rows of two shards
    Case(5, 17, (9,), BF16, SMALL, 3, False),  # threads load; a tile has rows of all shards
]


def test_every_way_has_the_bits_of_the_plain_calls() -> None:
    found = interpret(targets.wrong_products, 2, CASES, ["fused", "sequential", "auto"], env=GPU_COLLECTIVES)
    assert found == [[], []]


@pytest.mark.full
def test_a_tile_waits_for_its_rows_and_for_no_others() -> None:
    """Check that each change of the wait is caught: rows that are not there are NaN."""
    (found,) = interpret(targets.arriving_cases, 1, ["", "none", "a chunk less"])
    assert found.pop("") == [(True, True)] * 3
    for change, results in found.items():
        assert not all(right for right, _ in results), change


GIVEN = st.builds(
    Case,
    st.integers(1, 70),
    st.integers(1, 40),
    st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple),
    st.sampled_from([BF16, FP16]),
    st.sampled_from([SMALL, PERSISTENT, None]),
    st.integers(1, 4),
    st.booleans(),
)


@pytest.mark.full
@settings(max_examples=12)
@given(st.integers(2, 4), st.lists(GIVEN, min_size=3, max_size=3))
def test_every_shape_has_the_bits_of_the_plain_calls(ranks: int, cases: list[Case]) -> None:
    found = interpret(targets.wrong_products, ranks, cases, ["fused", "sequential"], env=GPU_COLLECTIVES)
    assert found == [[]] * ranks


@pytest.mark.full
def test_rows_of_float32_are_multiplied_beside_the_gather() -> None:
    cases = [Case(20, 30, (40, 7), torch.float32), Case(1, 5, (3,), torch.float32), Case(8, 16, (24,), BF16)]
    assert spawn(targets.wrong_products, 3, cases, ["sequential", "plain", "auto"], timeout_s=200) == [[]] * 3


@pytest.mark.full
def test_chunks_are_announced_when_they_are_in_place() -> None:
    early, too_early = (interpret(targets.early_announcements, 2, ahead, env=GPU_COLLECTIVES) for ahead in (0, 1))
    assert early == [0, 0]
    assert min(too_early) > 0


@pytest.mark.full
def test_an_absent_rank_is_named_and_a_reset_helps() -> None:
    seen, _ = interpret(targets.absent, 2, "cpu", 2.0, env=GPU_COLLECTIVES)
    assert seen["late"] == (1,)
    assert "all_gather_matmul" in seen["text"]
    assert seen["took"] < 20
    assert seen["again"]


@pytest.mark.full
def test_a_decision_serves_about_so_many_rows() -> None:
    for times, remembered in interpret(targets.measured, 2, env=GPU_COLLECTIVES):
        assert (times, remembered) == (1, 6)


FORM = gemm.GemmForm(4096, 256, 128, (128, 128, 256), False, True, BF16, 8, True, torch.device("cpu"))
SHAPE = LaunchShape(24, 4096, 16, 32 << 10)


@pytest.mark.parametrize("tma", [True, False])
def test_ranks_meet_for_what_is_compiled_and_not_for_shapes(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "has_tma", lambda device: tma)

    def name(config: GemmConfig = SMALL, shape: LaunchShape = SHAPE, **fields: Any) -> str:
        return call_of(replace(FORM, **fields), config, 2, shape).form

    assert name() == name(m=6144, n=512, k=64, strides=(64, 64, 512))
    assert name() == name(shape=replace(SHAPE, programs=16, chunk_bytes=64 << 10))
    assert (name() == name(unit=2)) == tma  # the copy engine takes rows that end anywhere
    others = [
        name(replace(SMALL, group=3)),
        name(replace(SMALL, tile_k=64)),
        name(replace(SMALL, warps=8)),
        name(b_rows_are_n=False),
        name(dtype=FP16),
        name(rows_are_units=False, unit=4),
        name(m=2, k=4),  # parts that are no whole units of 16 bytes
        name(shape=replace(SHAPE, block_words=2048)),
        name(shape=replace(SHAPE, num_warps=8)),
    ]
    assert len({name(), *others}) == 1 + len(others)


def test_operands_that_do_not_fit_are_refused() -> None:
    interpret(targets.refused, 2, env=GPU_COLLECTIVES)


@pytest.mark.full
def test_ranks_may_walk_through_tiles_in_other_orders() -> None:
    assert interpret(targets.other_order, 2, env=GPU_COLLECTIVES) == [True, True]


def test_ranks_with_other_rows_are_named() -> None:
    for text in interpret(targets.different_weights, 2, "cpu", env=GPU_COLLECTIVES):
        assert text.startswith("CollectiveMismatch")
        assert "all_gather_matmul" in text


PART = catalog.find("NVIDIA H200")


def test_the_way_is_the_one_that_models_find_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that large products are fused, and that few rows, float32 and unknown GPUs are not."""
    assert PART is not None
    monkeypatch.setattr(gathered_products, "sms_of", lambda device: 132)
    monkeypatch.setattr(gathered_products, "uses_own_product", lambda a: a.dtype != torch.float32)

    def way(rows: int, columns: int, dtype: torch.dtype = BF16, part: str = "NVIDIA H200") -> str:
        comm = Ranks(part)
        gathered = torch.empty((), dtype=dtype).expand(rows, 8192)
        weights = [torch.empty((), dtype=dtype).expand(8192, columns)]
        chosen = gathered_products.choose_way(comm, gathered, weights)  # type: ignore[arg-type]
        predicted = gathered_products.predicted_ways(comm, gathered, weights)  # type: ignore[arg-type]
        if chosen == "fused":
            assert predicted["fused"] < predicted["sequential"]
        return chosen

    assert [way(rows, 28672) for rows in (2048, 4096, 8192)] == ["fused"] * 3
    assert [way(rows, 5120) for rows in (4096, 8192)] == ["fused"] * 2
    assert way(16, 5120) == way(512, 8192) == "sequential"
    assert way(8192, 28672, torch.float32) == way(8192, 28672, part="another GPU") == "sequential"


class Ranks:
    """A stand-in for a communicator of two GPUs."""

    rank, world_size = 0, 2

    def __init__(self, part: str):
        self._state_above: dict[str, Any] = {}
        nodes = NodeLayout.one_node(2)
        self.topology = Topology(nodes, "cuda", part, GPUS, "", False, 64 << 20, registry.registered())

    def _problem(self, x: torch.Tensor, sms: int | None) -> CollectiveProblem:
        nbytes, dtype = x.numel() * x.element_size(), str(x.dtype).removeprefix("torch.")
        return CollectiveProblem(Op.ALL_GATHER, nbytes, dtype, self.topology, sms=sms or 0)

    def candidates(self, x: torch.Tensor, op: str, sms: int) -> list[str]:
        return [one.algorithm for one in candidates(self._problem(x, sms))]

    def explain(self, x: torch.Tensor, op: str) -> Any:
        problem = self._problem(x, None)
        candidate = choose(problem, "auto", "auto", (), "eager").candidate
        by_library = self.topology.algorithms[candidate.algorithm].library
        return SimpleNamespace(
            by_library=by_library, dtype=problem.dtype, nbytes=problem.nbytes, algorithm=candidate.algorithm
        )
