"""Two-shot in FP8: blocks alone and over ranks, compared with plain torch to the bit; and its error, with its bound."""

from __future__ import annotations

import ctypes
import random
import time
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_calls import run_call
from local_ranks import run_ranks
from shotcast.collectives.registry import registered
from shotcast.device.cpu import floats
from shotcast.errors import UnsupportedError
from shotcast.transport.cpu import fp8_blocks
from shotcast.transport.cpu.executor import CpuExecutor
from shotcast.wire import TIMEOUT, CallPlan, LaunchShape, Op, slice_bytes

pytestmark = pytest.mark.usefixtures("compiled_before_forking")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 128
KINDS = {
    "float32": (torch.float32, fp8_blocks.ENCODE["float32"], fp8_blocks.DECODE["float32"]),
    "float16": (torch.float16, fp8_blocks.ENCODE["float16"], fp8_blocks.DECODE["float16"]),
    "float16 by bits": (torch.float16, fp8_blocks.encoding("float16 by bits"), fp8_blocks.decoding("float16 by bits")),
    "bfloat16": (torch.bfloat16, fp8_blocks.ENCODE["bfloat16"], fp8_blocks.DECODE["bfloat16"]),
}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and bytes of float32 values, padded with zeros to whole blocks."""
    x = torch.cat([x, x.new_zeros(-len(x) % BLOCK)]).view(-1, BLOCK)
    odd = ~x.isfinite().all(1, keepdim=True)
    largest = x.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    scale = torch.where(odd, torch.full_like(largest, float("nan")), largest / 448.0)
    # 448.0 / largest would be a product with a reciprocal, which rounds twice.
    scaled = x * torch.div(torch.full_like(largest, 448.0), largest)
    byte = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return scale, torch.where(scaled.isnan(), torch.full_like(byte, 0x7F), byte)


def travelled(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize float32 values, as a message does on its way."""
    scale, byte = quantized(x)
    return (byte.view(torch.float8_e4m3fn).float() * scale).view(-1)[: len(x)]


def reference(inputs: list[torch.Tensor]) -> torch.Tensor:
    world_size, count, dtype = len(inputs), inputs[0].numel(), inputs[0].dtype
    part = slice_bytes(count * dtype.itemsize, world_size) // dtype.itemsize
    result = torch.empty_like(inputs[0])
    for owner in range(world_size):
        mine = slice(owner * part, (owner + 1) * part)
        total = torch.zeros(inputs[0][mine].shape)
        for x in inputs:
            total = total + travelled(x[mine].float())
        result[mine] = travelled(total).to(dtype)
    return result


def assert_bits(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Assert that bits are equal; where NaN is expected, any NaN will do."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan), what
    actual, expected = actual[~nan].contiguous(), expected[~nan].contiguous()
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), what


def values(count: int, dtype: torch.dtype, seed: int, special: float = 0.0) -> torch.Tensor:
    """Return blocks of very different magnitudes; a value is special with probability ``special``."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.exp(4 * torch.randn(-(-count // 64) or 1, generator=generator)).repeat_interleave(64)[:count]
    x = torch.randn(count, generator=generator) * magnitude
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -6e-8, 3e38, 65504.0])
    picked = odd[torch.randint(len(odd), (count,), generator=generator)]
    return torch.where(torch.rand(count, generator=generator) < special, picked, x).to(dtype)


def call(arithmetic, *arguments: int) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(arithmetic.address())(*arguments)


def encoded(kind: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((fp8_blocks.encoded_bytes(len(x)) + 8,), 0x5A, dtype=torch.uint8)
    call(KINDS[kind][1], out.data_ptr(), x.data_ptr(), len(x), 0)
    assert (out[-8:] == 0x5A).all()
    return out[:-8]


def check_blocks(kind: str, x: torch.Tensor) -> None:
    dtype, _, decode = KINDS[kind]
    memory = encoded(kind, x)
    scale, byte = quantized(x.float())
    whole = memory.view(-1, fp8_blocks.BLOCK_BYTES)
    assert_bits(whole[:, :4].contiguous().view(torch.float32), scale, "scales")
    assert torch.equal(whole[:, 4:].reshape(-1)[: len(x)], byte.view(-1)[: len(x)]), "bytes"
    out = torch.full((len(x) + 3,), 7.0).to(dtype)
    call(decode, out.data_ptr(), memory.data_ptr(), len(x), 0)
    assert_bits(out[: len(x)], travelled(x.float()).to(dtype), "decoded")
    assert out[len(x) :].tolist() == [7.0] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [0.0, 0.01, 0.5])
def test_blocks(kind, special):
    if kind == "float16" and not floats.machine_has_half():
        pytest.skip("no float16 conversions in hardware")
    for seed, count in enumerate((0, 1, 31, 32, 33, 127, 128, 129, 160, 255, 5000)):
        check_blocks(kind, values(count, KINDS[kind][0], seed, special))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_blocks_of_the_smallest_and_the_largest(kind):
    dtype = KINDS[kind][0]
    for exponent in (-149, -140, -133, -126, -118, -110, -101, -100, -99, -91, 100, 127):
        x = torch.linspace(-1, 1, 300, dtype=torch.float64) * 2.0**exponent
        check_blocks(kind, x.to(dtype))
    check_blocks(kind, torch.full((130,), torch.finfo(dtype).max, dtype=dtype))
    check_blocks(kind, torch.full((130,), -0.0, dtype=dtype))


@given(
    kind=st.sampled_from(["float32", "bfloat16", "float16 by bits"]),
    words=st.lists(st.integers(0, (1 << 32) - 1), max_size=200),
)
@settings(max_examples=80)
def test_blocks_of_any_bits(kind, words):
    dtype = KINDS[kind][0]
    if dtype is torch.float32:
        x = torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32).view(dtype)
    else:
        x = torch.tensor([word % 65536 for word in words], dtype=torch.int32).to(torch.int16).view(dtype)
    check_blocks(kind, x)


def test_sums_of_blocks():
    for seed, count in enumerate((1, 40, 128, 200, 1000)):
        for ranks in (1, 2, 3, 8):
            inputs = [values(count, torch.float32, 64 * seed + rank, 0.01 * (seed % 2)) for rank in range(ranks)]
            memory = [encoded("float32", x) for x in inputs]
            sources = array("q", [block.data_ptr() for block in memory])
            out, result = torch.zeros_like(memory[0]), torch.empty(count)
            call(fp8_blocks.SUM, out.data_ptr(), sources.buffer_info()[0], ranks, count)
            call(fp8_blocks.DECODE["float32"], result.data_ptr(), out.data_ptr(), count, 0)
            total = torch.zeros(count)
            for x in inputs:
                total = total + travelled(x)
            assert_bits(result, travelled(total), (count, ranks))


# -- over ranks -------------------------------------------------------------------------------------------------------


def check_sums(group, dtype, max_bytes):
    rank, world_size = group.rank, group.world_size
    executor = CpuExecutor(group, max_bytes, 100.0, registered())
    for seed, count in enumerate((0, 1, 7, 8, 9, 127, 129, 1000, 1024 * world_size, 4099, 30_001)):
        for turn, chunk in enumerate((0, 64, 2048) if count < 10_000 else (0, 4096)):
            special = (0.0, 0.0005)[turn % 2]
            inputs = [values(count, dtype, seed * 64 + r, special) for r in range(world_size)]
            x = torch.cat([inputs[rank][:1], inputs[rank]])[min(count, 1) :] if turn % 2 else inputs[rank].clone()
            out = x if (seed + turn) % 2 else torch.empty_like(x)
            launch = LaunchShape(chunk_bytes=chunk)
            plan = CallPlan(Op.ALL_REDUCE, "two_shot_fp8", name(dtype), count * dtype.itemsize, launch=launch)
            run_call(executor, plan, x, out)
            assert executor.fault() is None
            assert_bits(out, reference(inputs), (count, chunk))
            digests = group.all_gather(hash(bytes(out.contiguous().view(torch.uint8).tolist())))
            assert len(set(digests)) == 1
            if out is not x:
                assert_bits(x, inputs[rank], "x was changed")
    executor.close()


@pytest.mark.every(7)
@pytest.mark.parametrize(
    ("world_size", "dtype", "max_bytes"),
    [
        (1, torch.bfloat16, 1 << 20),
        *((2, dtype, 1 << 20) for dtype in FLOATS),
        (3, torch.float16, 1),
        (4, torch.bfloat16, 64 << 20),
        (5, torch.float32, 1),
        (8, torch.bfloat16, 1),
    ],
)
def test_sums_are_exact_to_the_bit(world_size, dtype, max_bytes):
    run_ranks(world_size, check_sums, dtype, max_bytes)


def check_error(group):
    """Check the bound of the error of a value and of the sum.

    A value is off by at most 1/16 of itself, or by 2^-10 a / 448 in a block with largest value a; the sum by as much
    again.
    """
    world_size = group.world_size
    executor = CpuExecutor(group, 1 << 20, 100.0, registered())
    count = 128 * 8 * world_size
    inputs = [values(count, torch.float32, r) for r in range(world_size)]
    out = torch.empty(count)
    run_call(executor, CallPlan(Op.ALL_REDUCE, "two_shot_fp8", "float32", 4 * count), inputs[group.rank], out)

    def off(x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)
        return torch.maximum(x.abs() / 16, largest / 448 * 2.0**-10) * (1 + 2.0**-20) + x.abs() * 2.0**-20

    exact = sum(x.double() for x in inputs)
    before = sum(off(x.double()) for x in inputs)
    bound = before + off(exact.abs() + before)
    assert ((out.double() - exact).abs() <= bound).all()
    assert (out.double() - exact).abs().max() > 0
    executor.close()


def test_the_error_is_bounded():
    run_ranks(3, check_error)


def check_stragglers(group, max_bytes, seconds):
    rank, world_size = group.rank, group.world_size
    executor = CpuExecutor(group, max_bytes, 100.0, registered())
    together, alone = random.Random(3), random.Random(300 + rank)
    calls = 0
    until = time.monotonic() + seconds
    while calls % 20 or not group.all_gather(calls > 0 and time.monotonic() > until)[0]:
        calls += 1
        dtype, count = together.choice(FLOATS), together.choice((1, 60, 1000, 3000, 9000))
        algorithm = together.choice(("two_shot_fp8", "two_shot_fp8", "two_shot", "one_shot", "ring"))
        launch = LaunchShape(chunk_bytes=together.choice((0, 512, 4096)))
        inputs = [values(count, dtype, calls * 8 + r) for r in range(world_size)]
        if alone.random() < 0.05:
            time.sleep(alone.random() * 0.003)
        plan = CallPlan(Op.ALL_REDUCE, algorithm, name(dtype), count * dtype.itemsize, launch=launch)
        x = inputs[rank].clone()
        run_call(executor, plan, x, x)
        assert executor.fault() is None
        if algorithm == "two_shot_fp8":
            assert_bits(x, reference(inputs), (calls, count))
    executor.close()
    return calls


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "max_bytes"), [pytest.param(2, 300_000, marks=pytest.mark.full), (4, 1)])
def test_stragglers_and_changing_sizes(world_size, max_bytes):
    assert min(run_ranks(world_size, check_stragglers, max_bytes, 2.0)) >= 20


def check_late(group, late):
    executor = CpuExecutor(group, 1 << 20, 1.0, registered())
    group.barrier()
    x = torch.ones(1000, dtype=torch.bfloat16)
    plan = CallPlan(Op.ALL_REDUCE, "two_shot_fp8", "bfloat16", 2000)
    if group.rank != late:
        run_call(executor, plan, x, x)
        fault = executor.fault()
        assert fault is not None
        assert (fault.kind, fault.ranks, fault.op) == (TIMEOUT, (late,), "all_reduce")
        assert x.isnan().all()
    group.barrier()
    executor.set_timeout(100)
    executor.clear(max(group.all_gather(executor.epoch)))
    group.barrier()
    x = torch.ones(1000, dtype=torch.bfloat16)
    run_call(executor, plan, x, x)
    assert x.tolist() == [group.world_size] * 1000
    for refused in (
        CallPlan(Op.ALL_REDUCE, "two_shot_fp8", "float64", 800),
        CallPlan(Op.REDUCE_SCATTER, "two_shot_fp8", "float32", 1200),
    ):
        with pytest.raises(UnsupportedError, match="two_shot_fp8"):
            executor.bind(refused)
    executor.close()


@pytest.mark.timing
def test_a_late_rank_is_named():
    run_ranks(3, check_late, 1)
