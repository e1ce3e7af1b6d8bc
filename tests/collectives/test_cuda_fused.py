"""The fused operations on real GPUs: every pair, four, or as many as there are. Run with ``pytest -m gpu``."""

from __future__ import annotations

import itertools

import fused_targets as targets
import pytest
from fused_targets import Case, Stopped
from test_interpreter_fused import TROUBLE
from workers import SIGNALS

import shotcast
from shotcast.collectives.rank_device import enough_gpus
from shotcast.wire import ALL_REDUCE_NORMS, Op

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]
WORLD_SIZES = [n for n in (2, 3, 4, 8) if enough_gpus(n)]
DTYPES = ["float32", "float16", "bfloat16"]
LENGTHS = [8, 64, 576, 1000, 2880, 4096, 5120, 8192]
ROWS = [0, 1, 2, 5, 8, 33, 129]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_values(world_size: int, part: int, dtype: str) -> None:
    """Compare algorithms bit by bit, also with the norm as a separate kernel.

    Every form of every length takes a second to compile. So each test takes two lengths, and one form for each number
    of rows. The interpreter runs the rest.
    """
    listed = [Case(dtype, rows, hidden, rows % 2) for hidden, rows in itertools.product(LENGTHS[part::4], ROWS)]
    listed.append(Case(dtype, 3, 16384 if dtype != "float32" else 8192))
    listed.append(Case(dtype, 700, 4096))
    ops = [Op.ALL_REDUCE_RMS_NORM]
    done = shotcast.spawn(targets.cases, world_size, "cuda", listed, ops, 64 << 20, 1, timeout_s=480)
    assert min(done) == max(done) >= len(listed) * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_layer_norms(world_size: int) -> None:
    """Compare as above, with weights of each dtype: tiles and whole rows, one program a row and up to 64."""
    listed = [
        Case(dtype, rows, LENGTHS[(2 * turn + rows) % 8], rows % 2, weight)
        for turn, (dtype, weight) in enumerate(itertools.product(DTYPES, ["", "float32", "bfloat16"]))
        for rows in (1, 33)
    ]
    listed += [Case("bfloat16", 3, 16384, 0, "float32"), Case("bfloat16", 700, 4096)]
    ops = [Op.ALL_REDUCE_LAYER_NORM]
    done = shotcast.spawn(targets.cases, world_size, "cuda", listed, ops, 64 << 20, 1, timeout_s=480)
    assert min(done) == max(done) >= len(listed) * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_weights_of_another_dtype(world_size: int, dtype: str) -> None:
    weights = [weight for weight in DTYPES if weight != dtype]
    listed = [Case(dtype, 5, hidden, 0, weight) for weight, hidden in itertools.product(weights, (72, 4096))]
    shotcast.spawn(targets.cases, world_size, "cuda", listed, list(ALL_REDUCE_NORMS), 16 << 20, 1, timeout_s=480)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_do_not_depend_on_algorithm_or_batch(world_size: int) -> None:
    results = shotcast.spawn(targets.bits_of_every_algorithm, world_size, "cuda", LENGTHS, timeout_s=300)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sentinels_arrive_as_nan(world_size: int) -> None:
    shotcast.spawn(targets.sentinels, world_size, "cuda", timeout_s=100)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_results_in_given_tensors(world_size: int, shift: int) -> None:
    shotcast.spawn(targets.into_given_tensors, world_size, "cuda", "bfloat16", 9, 1024, shift, timeout_s=300)


@pytest.mark.parametrize("dtype", DTYPES)  # most of the time is spent on compiling: best in processes of their own
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_two_thousand_changing_calls(world_size: int, dtype: str) -> None:
    args = ("cuda", 667, 20, [8, 576, 2048, 4096], 7, [dtype])
    shotcast.spawn(targets.changing_calls, world_size, *args, timeout_s=480)


@pytest.mark.parametrize("hidden", [4096, 8192])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_replay_on_changed_inputs(world_size: int, hidden: int) -> None:
    shotcast.spawn(targets.graphs, world_size, 200, hidden, timeout_s=480)


def expect_timeout(outcome: Stopped, missing: int, timeout_s: float, op: Op, reason: str = "late") -> None:
    assert isinstance(outcome.error, shotcast.CollectiveTimeout), outcome.error
    assert (outcome.error.missing, outcome.error.reason) == ((missing,), reason)
    assert outcome.error.op == op.label
    earliest, deadline = (timeout_s * 0.9, timeout_s) if reason == "late" else (0, 0)
    assert earliest < outcome.took < deadline + 1
    assert outcome.nan == {"quantized": True, "scale": True, "new_residual": True, "normed": True}
    assert isinstance(outcome.again, shotcast.CollectiveTimeout)
    assert outcome.again_s < 0.5


@pytest.mark.parametrize(("op", "algorithm"), [(op, algorithm) for op, algorithm, _ in TROUBLE])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_killed_rank(world_size: int, op: Op, algorithm: str) -> None:
    victim = world_size - 1
    args = ("cuda", op, algorithm, victim, SIGNALS["killed"], 600.0)
    results = shotcast.spawn(targets.stopped, world_size, *args, timeout_s=60, return_exceptions=True)
    assert isinstance(results[victim], shotcast.RankFailed)
    for outcome in results[:victim]:
        assert isinstance(outcome, Stopped), outcome
        expect_timeout(outcome, victim, 600.0, op, "dead")


@pytest.mark.parametrize(("op", "algorithm"), [(op, algorithm) for op, algorithm, _ in TROUBLE])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reset_after_a_late_rank(world_size: int, op: Op, algorithm: str) -> None:
    results = shotcast.spawn(targets.stopped, world_size, "cuda", op, algorithm, 0, "late", 2.0, timeout_s=100)
    assert results[0].error.missing == (0,)
    for outcome in results[1:]:
        expect_timeout(outcome, 0, 2.0, op)


@pytest.mark.parametrize(
    ("what", "field"), [("quantize", "root"), ("normed", "root"), ("weight", "root"), ("kind", "op")]
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_mismatch(world_size: int, what: str, field: str) -> None:
    for error, fields in shotcast.spawn(targets.mismatched, world_size, "cuda", what, timeout_s=60):
        assert isinstance(error, shotcast.CollectiveMismatch), error
        assert field in fields
