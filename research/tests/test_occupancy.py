"""Blocks on a multiprocessor: against published tables, against NVIDIA's occupancy calculator, and what must hold."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st
from occupancy import (
    MULTIPROCESSORS,
    Kernel,
    Leftover,
    Multiprocessor,
    Room,
    fits_beside,
    multiprocessor,
    resident_blocks,
    room_beside,
)

from shotcast.errors import ConfigError, UnsupportedError

H200, A100 = multiprocessor((9, 0)), multiprocessor((8, 0))
KERNELS = st.builds(
    Kernel,
    st.integers(1, 255),
    st.integers(1, 1024),
    st.integers(0, 227 << 10),
    st.integers(0, 16),
)
CAPABILITIES = st.sampled_from(sorted(MULTIPROCESSORS))
SMS = CAPABILITIES.map(multiprocessor)


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "blocks"),
    [
        # full occupancy takes at most 32 registers: CUDA C++ Best Practices Guide, calculating occupancy
        (32, 1024, 0, 2),
        (33, 1024, 0, 1),
        (32, 256, 0, 8),
        (37, 128, 0, 12),  # that guide's example: 37 registers are allocated as 40
        (64, 256, 0, 4),
        (255, 256, 0, 1),
        (16, 32, 0, 32),
        (168, 384, 227 << 10, 1),  # a warp-specialised product of CUTLASS on Hopper
        (32, 128, 113 << 10, 2),
        (32, 128, (113 << 10) + 1, 1),
        (32, 128, (227 << 10) + 1, 0),
        (65, 1024, 0, 0),
        (64, 1024, 0, 1),
        (32, 1025, 0, 0),
        (256, 32, 0, 0),
    ],
)
def test_known_figures_of_hopper(registers: int, threads: int, shared_bytes: int, blocks: int) -> None:
    assert resident_blocks(Kernel(registers, threads, shared_bytes), H200) == blocks


@pytest.mark.parametrize(("capability", "blocks"), [((8, 0), 3), ((8, 6), 2), ((8, 9), 2), ((9, 0), 4), ((10, 0), 4)])
def test_shared_memory_by_capability(capability: tuple[int, int], blocks: int) -> None:
    assert resident_blocks(Kernel(32, 128, 48 << 10), multiprocessor(capability)) == blocks


def test_a_barrier_is_a_limit_too() -> None:
    assert resident_blocks(Kernel(32, 32, 0, barriers=16), H200) == 4
    assert resident_blocks(Kernel(32, 32, 0, barriers=16), A100) == 32


def test_an_unknown_capability_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"compute capability 7\.0 are not known; those of 8\.0, 8\.6"):
        multiprocessor((7, 0))


# -- NVIDIA's calculator -----------------------------------------------------------------------------------------------

CALCULATOR = r"""
#include <cuda_occupancy.h>
int blocks(int major, int minor, int threads_per_sm, int shared_per_sm, int registers, int threads, int shared,
           int barriers) {
    cudaOccDeviceProp gpu = {0};
    gpu.computeMajor = major, gpu.computeMinor = minor, gpu.maxThreadsPerBlock = 1024;
    gpu.maxThreadsPerMultiprocessor = threads_per_sm, gpu.regsPerBlock = gpu.regsPerMultiprocessor = 65536;
    gpu.warpSize = 32, gpu.sharedMemPerBlock = 48 << 10, gpu.sharedMemPerMultiprocessor = shared_per_sm;
    gpu.numSms = 132, gpu.sharedMemPerBlockOptin = shared_per_sm - 1024, gpu.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes kernel = {0};
    kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = shared_per_sm - 1024, kernel.numBlockBarriers = barriers;
    cudaOccDeviceState state = {0};
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result;
    cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &gpu, &kernel, &state, threads, shared);
    return error ? -(int)error : result.activeBlocksPerMultiprocessor;
}
"""
"""It takes the calculator's word for all limits that it knows itself: blocks, units and barriers."""


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    if compiler is None or not (headers / "cuda_occupancy.h").exists():
        pytest.skip("this takes a C compiler and CUDA's header, which Triton brings along")
    folder = tmp_path_factory.mktemp("calculator")
    (folder / "calculator.c").write_text(CALCULATOR)
    command = [compiler, "-shared", "-fPIC", "-w", f"-I{headers}", "calculator.c", "-o", "calculator.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return ctypes.CDLL(str(folder / "calculator.so")).blocks


def calculated(calculator: Callable[..., int], kernel: Kernel, capability: tuple[int, int]) -> int:
    sm = multiprocessor(capability)
    return calculator(
        *capability,
        sm.max_threads,
        sm.shared_bytes,
        kernel.registers,
        kernel.threads,
        kernel.shared_bytes,
        kernel.barriers,
    )


def test_the_calculator_of_nvidia_says_the_same(calculator: Callable[..., int]) -> None:
    @given(KERNELS, CAPABILITIES)
    def compare(kernel: Kernel, capability: tuple[int, int]) -> None:
        if kernel.shared_bytes > multiprocessor(capability).max_block_shared_bytes:
            assert resident_blocks(kernel, multiprocessor(capability)) == 0
        else:
            expected = calculated(calculator, kernel, capability)
            assert resident_blocks(kernel, multiprocessor(capability)) == expected

    compare()


def test_every_size_of_block_and_register_count(calculator: Callable[..., int]) -> None:
    """Check what random kernels seldom meet: small blocks, in which sub-partitions hold unequal numbers of warps."""
    for threads in (1, 32, 33, 96, 128, 160, 224, 288, 416, 544, 1024):
        for registers in range(1, 256, 3):
            kernel = Kernel(registers, threads, 0)
            assert resident_blocks(kernel, H200) == calculated(calculator, kernel, (9, 0)), kernel


# -- what must hold ----------------------------------------------------------------------------------------------------


@given(KERNELS, SMS)
def test_needs_that_grow_never_make_room(kernel: Kernel, sm: Multiprocessor) -> None:
    blocks = resident_blocks(kernel, sm)
    assert 0 <= blocks <= sm.max_blocks
    for larger in (
        Kernel(kernel.registers + 1, kernel.threads, kernel.shared_bytes, kernel.barriers),
        Kernel(kernel.registers, kernel.threads + 1, kernel.shared_bytes, kernel.barriers),
        Kernel(kernel.registers, kernel.threads, kernel.shared_bytes + 1, kernel.barriers),
        Kernel(kernel.registers, kernel.threads, kernel.shared_bytes, kernel.barriers + 1),
    ):
        assert resident_blocks(larger, sm) <= blocks


@given(KERNELS, st.integers(0, 32), SMS)
def test_blocks_beside_blocks_of_the_same_kernel_are_the_rest(kernel: Kernel, first: int, sm: Multiprocessor) -> None:
    blocks = resident_blocks(kernel, sm)
    if first <= blocks:
        assert fits_beside(kernel, [(kernel, first)], sm) == blocks - first
    else:
        with pytest.raises(ConfigError, match="do not fit"):
            fits_beside(kernel, [(kernel, first)], sm)


@given(KERNELS, KERNELS, st.integers(0, 32), SMS)
def test_what_is_left_holds_what_fits_and_no_more(one: Kernel, other: Kernel, count: int, sm: Multiprocessor) -> None:
    resident = [(one, min(count, resident_blocks(one, sm)))]
    left, fitting = room_beside(resident, sm), fits_beside(other, resident, sm)
    assert fitting <= resident_blocks(other, sm)
    assert fitting <= left.blocks
    assert fitting * other.threads <= left.threads
    assert fitting * other.threads * other.registers <= left.registers
    assert not fitting or other.shared_bytes <= left.shared_bytes
    if fitting:
        smaller = room_beside([*resident, (other, fitting)], sm)
        assert (smaller.blocks, smaller.threads) < (left.blocks, left.threads)


@given(KERNELS, SMS)
def test_an_empty_multiprocessor_has_everything(kernel: Kernel, sm: Multiprocessor) -> None:
    all_of_it = Leftover(sm.max_blocks, sm.max_threads, sm.registers, sm.max_block_shared_bytes)
    assert room_beside([], sm) == room_beside([(kernel, 0)], sm) == all_of_it


def test_a_block_of_the_leftover_size_fits_exactly() -> None:
    product = Kernel(155, 256, 180_248)
    left = room_beside([(product, 1)], H200)
    assert left == Leftover(31, 2048 - 256, 65536 - 160 * 256, 233_472 - 181_376 - 1024)
    assert fits_beside(Kernel(32, 512, left.shared_bytes), [(product, 1)], H200) == 1
    assert fits_beside(Kernel(32, 512, left.shared_bytes + 1), [(product, 1)], H200) == 0
    assert fits_beside(Kernel(96, 256, 0), [(product, 1)], H200) == 1
    assert fits_beside(Kernel(104, 256, 0), [(product, 1)], H200) == 0


def test_room_of_a_gpu() -> None:
    product, sender = Kernel(155, 256, 229_408), Kernel(32, 512, 0)
    assert Room(H200, 24, 108, ((product, 1),)).blocks_of(sender) == 24 * 4 + 108
    assert Room(H200, 24, 108, None).blocks_of(sender) == 24 * 4
    assert Room(H200, 24, 108, None).beside == Leftover(0, 0, 0, 0)
    assert Room(H200, 0, 132, ((product, 1),)).beside.shared_bytes == 233_472 - 230_528 - 1024


@pytest.mark.parametrize("needs", [(32, 0, 0), (-1, 32, 0), (32, 32, -1)])
def test_impossible_needs_are_refused(needs: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="at least one thread"):
        Kernel(*needs)
