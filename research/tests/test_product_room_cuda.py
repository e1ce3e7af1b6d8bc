"""research/product_room.py on a real GPU: the model of occupancy against the driver, and where blocks run."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import large_gemm as gemm
import pytest
import torch
import triton
import triton.language as tl
from large_gemm import GemmConfig
from matmuls import LibraryProduct, ShapedProduct, sms_of
from occupancy import Kernel, resident_blocks
from product_room import GreenProduct, blocks_per_sm, kernel_of, multiprocessor_of, room_beside_product, seen_kernels

from shotcast.errors import UnsupportedError

pytestmark = pytest.mark.gpu


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    a = torch.randn(m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    return a, torch.randn(n, k, generator=generator, device="cuda", dtype=torch.bfloat16).T


@pytest.mark.parametrize(
    ("tile", "warps", "stages"),
    [
        ((64, 64, 32), 4, (2, 3, 5, 8)),
        ((64, 64, 64), 4, (2, 3, 5, 8)),
        ((128, 128, 64), 4, (2, 3, 4)),
        ((128, 128, 64), 8, (2, 3, 4)),
        ((128, 256, 64), 8, (3, 4)),
        ((16, 16, 16), 4, (2, 3)),
    ],
)
def test_the_driver_says_the_same_of_occupancy(tile: tuple[int, int, int], warps: int, stages: tuple[int, ...]) -> None:
    a, b = operands(256, 256, 256)
    sm = multiprocessor_of(a.device)
    checked = 0
    for stage, padding in itertools.product(stages, (0, 1, 1000, 10_000, 30_000, 60_000, 100_000, 150_000)):
        config = GemmConfig(*tile, stage, warps, padding_bytes=padding)
        if gemm.shared_bytes(config) > sm.max_block_shared_bytes - 512:  # a compiled kernel needs a little more
            continue
        bound = ShapedProduct(config).bound(a, b)
        needs = kernel_of(bound)
        assert resident_blocks(needs, sm) == blocks_per_sm(bound._run), (stage, padding, needs)
        checked += 1
    assert checked > len(stages)


@triton.jit
def where(found, rounds: tl.constexpr):
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    for _ in range(rounds):  # so that no program ends before all have begun
        tl.atomic_add(found + 4096, 1)
    tl.store(found + tl.program_id(0), sm)


def sms_of_programs(programs: int) -> int:
    """Return the number of SMs that run so many programs of a kernel of which one leaves room for another."""
    found = torch.full((4097,), -1, dtype=torch.int32, device="cuda")
    where[(programs,)](found, 200, num_warps=8)
    return len(set(found[:programs].tolist()))


@pytest.mark.parametrize("programs", [24, 100, 108, 132])
def test_an_idle_gpu_starts_programs_on_an_sm_each(programs: int) -> None:
    for _ in range(20):
        assert sms_of_programs(programs) == min(programs, sms_of(torch.device("cuda", 0)))


@pytest.mark.parametrize("left", [8, 24, 100])
def test_a_green_context_leaves_at_least_what_was_asked(left: int) -> None:
    device = torch.device("cuda", 0)
    a, b = operands(256, 256, 256)
    product = GreenProduct(left)
    room = room_beside_product(product, a, b)
    assert left <= room.free_sms < left + 8
    where.device_caches.clear()  # a module belongs to a context
    with product.scope(device):
        used = sms_of_programs(1000)
    where.device_caches.clear()
    assert used == room.busy_sms == sms_of(device) - room.free_sms


def test_the_library_is_seen() -> None:
    a, b = operands(4096, 4096, 4096)
    LibraryProduct()(a, b)
    (seen,) = seen_kernels(lambda: LibraryProduct()(a, b))
    assert seen.blocks > 1
    assert seen.threads % 32 == 0
    room = room_beside_product(LibraryProduct(), a, b)
    assert room.free_sms == max(0, sms_of(a.device) - seen.blocks)
    ours = ShapedProduct()
    ours(a, b)
    (seen,) = seen_kernels(lambda: ours(a, b))
    needs = kernel_of(ours.bound(a, b))
    assert tuple(seen[2:]) == (needs.threads, needs.registers, needs.shared_bytes)
    assert seen.blocks == ours.bound(a, b).programs


PRODUCTS = [
    ShapedProduct(),
    ShapedProduct(sms=100),
    ShapedProduct(GemmConfig(64, 64, 64, 3, 4)),
    LibraryProduct(),
    LibraryProduct(24),
    GreenProduct(24),
]


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_values_and_room(product: Any) -> None:
    a, b = operands(1000, 1536, 1024)
    out = torch.full((1000, 1536), float("nan"), device="cuda", dtype=torch.bfloat16)
    exact = a.double() @ b.double()
    for result in (product(a, b, out), product(a, b)):
        torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=2**-8)
    room = room_beside_product(product, a, b)
    assert room.free_sms + room.busy_sms == sms_of(a.device)
    if product.sms if isinstance(product, ShapedProduct) else product.left_sms:
        assert room.free_sms >= 24 or not isinstance(product, ShapedProduct)
        assert room.blocks_of(Kernel(32, 1024, 0)) >= 2 * room.free_sms


def test_a_scope_ends_with_an_exception() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with contextlib.suppress(KeyError), GreenProduct(24).scope(torch.device("cuda", 0)):
            assert torch.cuda.current_stream() != stream
            raise KeyError
        assert torch.cuda.current_stream() == stream


def test_a_green_context_waits_and_is_waited_for() -> None:
    a, b = operands(4096, 4096, 4096)
    exact = (a @ b) * 2
    product = GreenProduct(24)
    product(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            torch.cuda._sleep(2_000_000)
            doubled = a * 2
            found = product(doubled, b) + 0
            doubled.fill_(float("nan"))
            assert torch.equal(found, exact)


def test_a_green_context_in_a_graph_is_refused() -> None:
    a, b = operands(256, 256, 256)
    GreenProduct(24)(a, b)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="captured"), torch.cuda.graph(graph):
        GreenProduct(24)(a, b)


@pytest.mark.parametrize("left", [8, 24, 64])
def test_the_library_heeds_a_carve_out(left: int) -> None:
    a, b = operands(8192, 8192, 8192)
    assert room_beside_product(LibraryProduct(), a, b).free_sms == 0
    assert room_beside_product(LibraryProduct(left), a, b).free_sms >= left
