"""A communicator over several nodes is one like any other: sums by documented order, other calls, faults, splits."""

from __future__ import annotations

import hosts_targets as targets
import pytest
import workers

import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.errors import RankFailed

TWO_A_NODE = {"SHOTCAST_RANKS_PER_NODE": "2"}
ONE_A_NODE = {"SHOTCAST_RANKS_PER_NODE": "1"}
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize(("ranks", "env"), [(4, TWO_A_NODE), (3, ONE_A_NODE)], ids=["2x2", "3x1"])
def test_every_algorithm_gives_the_documented_bits(ranks: int, env: dict[str, str]) -> None:
    done = shotcast.spawn(workers.matrix, ranks, "cpu", DTYPES, [0, 1, 4099], 1, None, 7, env=env, timeout_s=300)
    assert done[0] >= 9 * 8, "four algorithms, twice each"


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "ranks"), [(1, 4), (4, 1), (2, 1), (2, 3), (3, 2), (4, 2), (5, 1), (8, 1), (8, 2), (10, 1)]
)
def test_every_algorithm_on_more_nodes(nodes: int, ranks: int) -> None:
    env, counts = {"SHOTCAST_RANKS_PER_NODE": str(ranks)}, [0, 1, 7, 4099, 70_000]
    shotcast.spawn(workers.matrix, nodes * ranks, "cpu", DTYPES, counts, 1, None, 9, env=env, timeout_s=550)


@pytest.mark.full
def test_operations_that_the_library_carries() -> None:
    reasons = shotcast.spawn(targets.other_operations, 4, env=TWO_A_NODE, timeout_s=300)[0]
    assert "by cost model: predicted us: nvrar " in reasons["all_reduce"]
    assert ", for 2x2 ranks over tcp of " in reasons["all_reduce"]
    assert "legal: nvrar, nvrar_halving, nvrar_pairs, nvrar_two_shot, vendor" in reasons["all_reduce"]
    for name in ("barrier", "send", "all_gather"):
        assert "one_shot (chunks of default bytes)" in reasons[name]
    assert "legal: nvrar, nvrar_halving, nvrar_pairs, nvrar_two_shot, vendor" in reasons["all_reduce_rms_norm"]
    assert "legal: nvrar_pairs, vendor" in reasons["reduce"]
    assert "vendor, by legality: no native kernel carries reduce_scatter between hosts" in reasons["reduce_scatter"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "ranks"), [(2, 2), *(pytest.param(*shape, marks=pytest.mark.full) for shape in ((3, 1), (3, 2), (5, 1)))]
)
def test_reductions_between_hosts(nodes: int, ranks: int) -> None:
    """A reduce has the bits of an all_reduce; of other reductions, those go between nodes that no order changes."""
    env = {"SHOTCAST_RANKS_PER_NODE": str(ranks)}
    for found in shotcast.spawn(targets.reductions, nodes * ranks, env=env, timeout_s=200):
        own = {name for name, text in found.items() if ": nvrar_pairs (" in text}
        left = set(found) - own
        floats = ("float32", "float16", "bfloat16", "float64")
        assert left == {
            *(f"{reduction} of {dtype}" for dtype in floats for reduction in ("prod", "avg")),
            *("sum of float64", *(f"{how} of complex{bits}" for how in ("sum", "avg") for bits in (64, 128))),
        } & set(found)
        assert (
            "nodes are reduced one with another, and prod of float32 is in the order of ranks"
            in found["prod of float32"]
        )
        assert {"sum of bfloat16", "max of float64", "prod of int64", "sum of bool"} <= own


@pytest.mark.full
@pytest.mark.timing
def test_faults_name_ranks_and_nodes() -> None:
    for seen in shotcast.spawn(targets.faults, 4, env=TWO_A_NODE, timeout_s=300):
        for late in seen[::2]:
            kind, (reason, missing, where), took = late
            assert (kind, reason, missing) == ("CollectiveTimeout", "late", (3,))
            assert where.startswith("3 (node ")
            assert where.endswith("/1)")
            assert took < 0.6 + 1
        for mismatch, field in zip(seen[1::2], ("nbytes", "root"), strict=True):
            kind, named, took = mismatch
            assert (kind, named) == ("CollectiveMismatch", ((3,), (field,)))
            assert took < 0.6 + 1


def test_the_deadline_of_calls_is_not_that_of_the_construction() -> None:
    assert shotcast.spawn(targets.with_a_short_deadline, 2, env=ONE_A_NODE, timeout_s=300) == [[2.0] * 3] * 2


@pytest.mark.timing
def test_a_killed_rank_of_another_node_is_named_at_once() -> None:
    results = shotcast.spawn(targets.killed, 4, 2, env=TWO_A_NODE, timeout_s=300, return_exceptions=True)
    assert isinstance(results.pop(2), RankFailed)
    for outcomes in results:
        for kind, (reason, missing, where), took in outcomes:
            assert (kind, reason, missing) == ("CollectiveTimeout", "dead", (2,))
            assert "(node " in where
            assert took < 60, "long before the deadline"


@pytest.mark.full
def test_splits_keep_the_nodes_of_their_ranks() -> None:
    across, within = shotcast.spawn(targets.splits, 4, env=TWO_A_NODE, timeout_s=300)[0]
    assert "for 2x1 ranks over tcp" in across
    assert "one_shot" in within
    assert "tcp" not in within


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "of_node", "counts"), [(4, "2", [333]), pytest.param(3, "1", [0, 5, 333, 2051], marks=pytest.mark.full)]
)
def test_kernels_of_gpus_on_logical_nodes(ranks: int, of_node: str, counts: list[int]) -> None:
    """By the interpreter: ``auto`` takes sums over nodes, while algorithms without nodes serve by name."""
    env = {**GPU_COLLECTIVES, "SHOTCAST_RANKS_PER_NODE": of_node}
    for reasons in interpret(targets.by_peer_stores, ranks, counts, env=env):
        assert "predicted us: " in reasons["all_reduce"]
        assert f"{ranks // int(of_node)}x{of_node} ranks over peer stores" in reasons["all_reduce"]
        legal = "one_shot, two_shot, two_shot_fp8, ring, nvrar, nvrar_16bit, nvrar_halving, nvrar_pairs, vendor"
        assert f"legal: {legal}" in str(reasons)
        if of_node == "2":
            assert "nvrar" in reasons["all_reduce"].partition(" by cost model")[0]
            assert "nvrar" in reasons["all_reduce_rms_norm"].partition(" by cost model")[0]
            assert "vendor, by legality" in reasons["reduce_scatter"]
            another = "one_shot adds up in another order than the contract has over several nodes"
            assert another in reasons["reduce_scatter"]
