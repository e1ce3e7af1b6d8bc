"""Sums that go on through residual add, RMSNorm and FP8: all operations and forms, compared with one process."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from typing import NamedTuple

import pytest
import torch

from executor_calls import run_call
from local_ranks import DEAD, LocalGroup, run_ranks
from shotcast.collectives.registry import registered
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.memory.operands import NormTensors
from shotcast.transport.cpu.executor import CpuExecutor
from shotcast.transport.cpu.norm_rows import norm_sum
from shotcast.wire import MISMATCH, QUANTIZATIONS, TIMEOUT, CallPlan, LaunchShape, Norm, Op

pytestmark = pytest.mark.usefixtures("compiled_before_forking")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FORMS = [(quantization, keeps) for quantization in QUANTIZATIONS for keeps in (True, False) if keeps or quantization]
WAYS = (
    (Op.ALL_REDUCE_RMS_NORM, "one_shot"),
    (Op.ALL_REDUCE_RMS_NORM, "two_shot"),
)
EPS = 1e-6


class Case(NamedTuple):
    """One fused call."""

    op: Op
    algorithm: str
    dtype: torch.dtype
    rows: int
    hidden: int
    quantization: str = ""
    keeps: bool = True
    chunk: int = 0

    @property
    def plan(self) -> CallPlan:
        norm = Norm(self.hidden, self.quantization, self.keeps)
        return CallPlan(
            self.op,
            self.algorithm,
            str(self.dtype).removeprefix("torch."),
            self.rows * self.hidden * self.dtype.itemsize,
            root=norm.code,
            launch=LaunchShape(chunk_bytes=self.chunk),
            norm=norm,
        )


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator) * 2)
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), -6e-8, 1e-40])
    picked = special[torch.randint(len(special), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.0005, picked, x).to(dtype)


def misaligned(x: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a copy of x that starts ``offset`` elements into its storage."""
    flat = torch.empty(x.numel() + offset, dtype=x.dtype)[offset:]
    return flat.view(x.shape).copy_(x)


def empty_tensors(case: Case, residual: torch.Tensor, weight: torch.Tensor, seed: int) -> NormTensors:
    """Return tensors as a caller has them, some of them in place or unaligned."""
    shape, offset = (case.rows, case.hidden), seed % 3
    residual = misaligned(residual, offset)
    scale = None
    if case.quantization:
        scale = torch.full((1,), 0.02) if case.quantization == "static" else torch.empty(case.rows, 1)
    return NormTensors(
        residual,
        weight,
        EPS,
        residual if seed % 2 else torch.empty_like(residual),
        misaligned(torch.empty(shape, dtype=case.dtype), offset) if case.keeps else None,
        torch.empty(shape, dtype=torch.float8_e4m3fn) if case.quantization else None,
        scale,
    )


def expected_tensors(case: Case, inputs, residual, weight) -> NormTensors:
    """Return the new residual by plain torch, and its norm."""
    total = torch.zeros(case.rows, case.hidden)
    for x in inputs:
        total = total + x.float()
    total = total.to(case.dtype)
    tensors = empty_tensors(case, residual, weight, 0)
    norm_sum(total, tensors, Norm(case.hidden, case.quantization, case.keeps))
    new_residual = (total.float() + residual.float()).to(case.dtype)
    assert_bits(tensors.new_residual, new_residual, "the reference itself")
    return tensors._replace(new_residual=new_residual)


def assert_bits(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Assert that bits are equal; where NaN is expected, any NaN will do."""
    assert actual.shape == expected.shape, what
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan), what
    actual, expected = actual[~nan].contiguous(), expected[~nan].contiguous()
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), what


def assert_tensors(actual: NormTensors, expected: NormTensors, what: object) -> None:
    assert_bits(actual.new_residual, expected.new_residual, ("new_residual", what))
    for name in ("normed", "quantized", "scale"):
        result, wanted = getattr(actual, name), getattr(expected, name)
        assert (result is None) == (wanted is None)
        if name == "quantized" and wanted is not None:
            assert torch.equal(result.view(torch.uint8), wanted.view(torch.uint8)), (name, what)
        elif wanted is not None:
            assert_bits(result, wanted, (name, what))


def run_case(executor: CpuExecutor, group: LocalGroup, case: Case, seed: int) -> None:
    rank, world_size = group.rank, group.world_size
    inputs = [values((case.rows, case.hidden), case.dtype, seed * 64 + r) for r in range(world_size)]
    residual = values((case.rows, case.hidden), case.dtype, seed * 64 + 8)
    weight = values((case.hidden,), case.dtype, seed * 64 + 16)
    expected = expected_tensors(case, inputs, residual, weight)
    x = misaligned(inputs[rank], seed % 2)
    tensors = empty_tensors(case, residual, weight, seed)
    if case.keeps and seed % 5 == 0:
        tensors = tensors._replace(normed=x)
    run_call(executor, case.plan, x, None, tensors)
    assert executor.fault() is None
    assert_tensors(tensors, expected, (case, seed))
    if tensors.normed is not x:
        assert_bits(x, inputs[rank], "x was changed")


def check_values(group, dtype, max_bytes):
    executor = CpuExecutor(group, max_bytes, 100.0, registered())
    world_size = group.world_size
    for seed, (hidden, per_rank) in enumerate(
        ((1, 1), (7, 3), (33, 0), (64, 2), (1, 40), (257, 5), (2880, 1), (1000, 9), (5003, 2))
    ):
        for turn, (way, form) in enumerate(itertools.product(WAYS, FORMS)):
            if hidden > 500 and turn % 3 != seed % 3:
                continue
            rows = per_rank * world_size + (1 if per_rank else 0)
            chunk = (0, 64, 1 << 12)[turn % 3] if rows * hidden < 20_000 else (0, 1 << 12, 1 << 14)[turn % 3]
            run_case(executor, group, Case(*way, dtype, rows, hidden, *form, chunk), seed + turn)
    executor.close()


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("world_size", "dtype", "max_bytes"),
    [
        (1, torch.bfloat16, 1 << 20),
        *((2, dtype, 1 << 20) for dtype in FLOATS),
        # A generation shorter than the longest row.
        (2, torch.float32, 1),
        (3, torch.bfloat16, 1 << 20),
        (4, torch.float32, 1),
        pytest.param(5, torch.float16, 1 << 20, marks=pytest.mark.full),
        pytest.param(8, torch.bfloat16, 1, marks=pytest.mark.full),
    ],
)
def test_fused_operations_have_the_bits_of_sum_and_norm(world_size, dtype, max_bytes):
    run_ranks(world_size, check_values, dtype, max_bytes)


def check_stragglers(group, max_bytes, seconds):
    """Alternate fused and plain calls of changing sizes, with every rank late at times."""
    rank, world_size = group.rank, group.world_size
    executor = CpuExecutor(group, max_bytes, 100.0, registered())
    together, alone = random.Random(2), random.Random(200 + rank)
    calls = 0
    until = time.monotonic() + seconds
    while calls % 20 or not group.all_gather(calls > 0 and time.monotonic() > until)[0]:
        calls += 1
        way, form = together.choice(WAYS), together.choice(FORMS)
        rows, hidden = together.choice((1, 2, 5)) * world_size, together.choice((3, 64, 200, 3000))
        chunk = together.choice((0, 4096) if hidden > 200 else (0, 64, 256, 4096))
        if alone.random() < 0.05:
            time.sleep(alone.random() * 0.003)
        run_case(executor, group, Case(*way, together.choice(FLOATS), rows, hidden, *form, chunk), calls)
        if together.random() < 0.3:
            count = together.choice((1, 1000, 5000))
            x = torch.full((count,), float(rank + calls))
            algorithm = together.choice(("one_shot", "two_shot", "ring"))
            run_call(executor, CallPlan(Op.ALL_REDUCE, algorithm, "float32", count * 4), x, x)
            assert x.tolist() == [float(sum(range(world_size)) + calls * world_size)] * count
    executor.close()
    return calls


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "max_bytes"),
    [pytest.param(2, 300_000, marks=pytest.mark.full), pytest.param(3, 1, marks=pytest.mark.full), (8, 1)],
)
def test_stragglers_and_changing_sizes(world_size, max_bytes):
    assert min(run_ranks(world_size, check_stragglers, max_bytes, 2.0)) >= 20


# -- faults -----------------------------------------------------------------------------------------------------------


FORK = multiprocessing.get_context("fork")
LONG_S, SOON_S = 300.0, 60.0
"""A deadline that a test does not wait for, and the longest that a fault takes to be seen on a busy machine."""


def some_tensors(case: Case) -> NormTensors:
    residual = torch.ones(case.rows, case.hidden, dtype=case.dtype)
    tensors = empty_tensors(case, residual, torch.ones(case.hidden, dtype=case.dtype), 0)
    for tensor in (tensors.new_residual, tensors.normed):
        if tensor is not None:
            tensor.fill_(1)
    if tensors.quantized is not None:
        tensors.quantized.view(torch.uint8).fill_(1)
    return tensors


def assert_stopped(case: Case, tensors: NormTensors) -> None:
    assert tensors.new_residual.isnan().all()
    assert tensors.normed is None or tensors.normed.isnan().all()
    assert tensors.quantized is None or (tensors.quantized.view(torch.uint8) == 0x7F).all()
    if case.quantization == "dynamic":
        assert tensors.scale.isnan().all()
    elif case.quantization == "static":
        assert tensors.scale.tolist() == [pytest.approx(0.02)]


def reset(executor: CpuExecutor, group: LocalGroup) -> None:
    executor.drain()
    epoch = max(group.all_gather(executor.epoch))
    executor.clear(epoch)
    group.barrier()
    for seed, way in enumerate(WAYS):
        run_case(executor, group, Case(*way, torch.bfloat16, 2 * group.world_size, 50, "dynamic"), seed)


def check_late(group, late, case):
    executor = CpuExecutor(group, 1 << 20, LONG_S, registered())
    x = torch.ones(case.rows, case.hidden, dtype=case.dtype)
    tensors = some_tensors(case)
    group.barrier()
    if group.rank == late:
        group.barrier()  # the others have given up
    else:
        executor.set_timeout(1.0)
    begun = time.monotonic()
    run_call(executor, case.plan, x, None, tensors)
    took = time.monotonic() - begun
    if group.rank != late:
        group.barrier()
    fault = executor.fault()
    assert fault is not None
    assert (fault.kind, fault.ranks, fault.op) == (TIMEOUT, (late,), case.op.label)
    assert took < SOON_S if group.rank == late else 0.9 < took < SOON_S
    assert_stopped(case, tensors)
    # The fault stays, and the next call overwrites all its outputs, too.
    tensors = some_tensors(case)
    run_call(executor, case.plan, x, None, tensors)
    assert_stopped(case, tensors)
    group.barrier()
    executor.set_timeout(LONG_S)
    reset(executor, group)
    executor.close()


@pytest.mark.timing
@pytest.mark.parametrize(
    ("world_size", "late", "way", "form"),
    [
        (2, 0, WAYS[0], ("static", False)),
        (3, 1, WAYS[1], ("dynamic", True)),
        (4, 3, WAYS[0], ("dynamic", False)),
        (3, 2, WAYS[1], ("static", True)),
        (2, 1, WAYS[1], ("", True)),
    ],
)
def test_a_late_rank_is_named_and_nothing_looks_like_a_result(world_size, late, way, form):
    run_ranks(world_size, check_late, late, Case(*way, torch.float16, 2 * world_size, 24, *form))


def check_killed(group, victim, way, number, given_up):
    """Kill or stop ``victim`` in the middle of a call, between chunks of a row."""
    executor = CpuExecutor(group, 1 << 20, 2.0, registered())
    case = Case(*way, torch.bfloat16, 2048 * group.world_size, 4096, "dynamic", True, 128)
    x = torch.ones(case.rows, case.hidden, dtype=case.dtype)
    group.barrier()
    if group.rank == victim:
        process = os.getpid()
        if number == signal.SIGSTOP and os.fork() == 0:
            given_up.wait(SOON_S)
            os.kill(process, signal.SIGCONT)
            os._exit(0)
        threading.Timer(0.05, os.kill, (process, number)).start()
    until = time.monotonic() + 100
    while executor.fault() is None and time.monotonic() < until:  # a fast machine makes several calls before the signal
        tensors = some_tensors(case)
        run_call(executor, case.plan, x, None, tensors)
    given_up.set()
    fault = executor.fault()
    assert fault is not None
    assert (fault.kind, fault.ranks) == (TIMEOUT, (victim,))
    if group.rank == victim:  # its own part may have been done when it was stopped, so that only the next call fails
        tensors = some_tensors(case)
        run_call(executor, case.plan, x, None, tensors)
    assert_stopped(case, tensors)
    if number == signal.SIGSTOP:
        group.barrier()
        executor.set_timeout(LONG_S)
        # The state of a row that a call had begun must not reach the next call.
        reset(executor, group)
    executor.close()
    return "named"


@pytest.mark.timing
def test_a_killed_rank_is_named():
    results = run_ranks(3, check_killed, 1, WAYS[1], signal.SIGKILL, FORK.Event(), mortal=True)
    assert results == ["named", DEAD, "named"]


@pytest.mark.timing
@pytest.mark.parametrize(
    "way",
    [pytest.param(WAYS[0], marks=pytest.mark.full), WAYS[1]],
    ids=lambda way: f"{way[0].label}-{way[1]}",
)
def test_a_stopped_rank_is_named_and_comes_back(way):
    assert run_ranks(2, check_killed, 1, way, signal.SIGSTOP, FORK.Event()) == ["named"] * 2


def check_mismatches(group):
    executor = CpuExecutor(group, 1 << 20, LONG_S, registered())
    usual = Case(*WAYS[0], torch.bfloat16, 6, 8)
    for odd, other in (
        (0, usual._replace(quantization="dynamic")),
        (1, usual._replace(algorithm="two_shot")),
        (2, usual._replace(op=Op.ALL_REDUCE_LAYER_NORM)),
    ):
        case = other if group.rank == odd else usual
        tensors = some_tensors(case)
        run_call(executor, case.plan, torch.ones(6, 8, dtype=torch.bfloat16), None, tensors)
        fault = executor.fault()
        assert fault is not None
        assert (fault.kind, fault.ranks) == (MISMATCH, (odd,))
        assert_stopped(case, tensors)
        group.barrier()
        reset(executor, group)
    executor.close()


@pytest.mark.timing
def test_other_forms_of_a_norm_are_mismatches():
    run_ranks(3, check_mismatches)


def check_refusals(group):
    executor = CpuExecutor(group, 1 << 20, LONG_S, registered())
    good = Case(*WAYS[0], torch.bfloat16, 6, 8)
    for case, error, text in (
        (good._replace(algorithm="ring"), UnsupportedError, "no ring all_reduce_rms_norm of bfloat16"),
        (good._replace(dtype=torch.float64), UnsupportedError, "of float64"),
        (good._replace(hidden=0), ConfigError, "no rows of 0"),
    ):
        with pytest.raises(error, match=text):
            executor.bind(case.plan)
    uneven = CallPlan(Op.ALL_REDUCE_RMS_NORM, "one_shot", "bfloat16", 6 * 16 + 2, norm=Norm(8))
    with pytest.raises(ConfigError, match="98 bytes of bfloat16 are no rows of 8"):
        executor.bind(uneven)
    with pytest.raises(ConfigError, match="the residual"):
        run_call(executor, good.plan, torch.ones(6, 8, dtype=torch.bfloat16), None)
    executor.bind(good.plan).load()
    assert executor.bind(good.plan).call.schedule._loaded is not None
    # A sum of the vendor library is checked by its header, and normed elsewhere.
    run_call(executor, good._replace(algorithm="vendor", hidden=0).plan, None, None)
    assert executor.fault() is None
    executor.close()


def test_what_is_no_call_is_refused():
    run_ranks(2, check_refusals)
