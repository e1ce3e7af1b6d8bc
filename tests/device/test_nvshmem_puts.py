"""Puts of NVSHMEM in a kernel: what Triton links, and what it costs. Skipped without the package nvidia.nvshmem."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import triton
import triton.language as tl

import cross
from shotcast.device.triton.intrinsics import kernel
from shotcast.device.triton.nvshmem import put_nbi_block
from shotcast.errors import ConfigError
from shotcast.memory import nvshmem_library


@kernel
def put_tiles(source, target, pe, count, BLOCK: tl.constexpr):  # noqa: N803
    """Stage tiles of 64-bit words and put each, with a tile in registers meanwhile."""
    kept = tl.load(source.to(tl.pointer_type(tl.int64)) + tl.arange(0, BLOCK))
    for number in range(count):
        at = source + number.to(tl.int64) * (8 * BLOCK)
        tl.store(at.to(tl.pointer_type(tl.int64)) + tl.arange(0, BLOCK), kept)
        put_nbi_block(target + number.to(tl.int64) * (8 * BLOCK), at, tl.full((), 8 * BLOCK, tl.int64), pe)
        kept += 1
    tl.store(source.to(tl.pointer_type(tl.int64)) + tl.arange(0, BLOCK), kept)


@pytest.fixture(scope="module")
def libraries() -> dict[str, str]:
    try:
        return nvshmem_library.extern_libs()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def compiled(libraries: dict[str, str]) -> triton.compiler.CompiledKernel:
    signature = {"source": "i64", "target": "i64", "pe": "i32", "count": "i32", "BLOCK": "constexpr"}
    options = {"extern_libs": libraries}
    return cross.build(put_tiles, signature, {"BLOCK": 512}, 4, 90, options=options)


def test_a_put_is_linked_into_the_kernel(compiled: triton.compiler.CompiledKernel) -> None:
    ptx = compiled.asm["ptx"]
    assert not re.search(r"\.extern\s+\.func", ptx)
    assert "nvshmemi_device_state_d" in ptx
    assert cross.instructions(ptx)["st.volatile.global.v4.u32"] >= 1, "mapped memory gets quads of the whole block"


def test_a_put_is_between_barriers_of_its_program(compiled: triton.compiler.CompiledKernel) -> None:
    """So what all threads stage is stored before it is sent, and sent before it is staged again."""
    text = compiled.asm["llir"].partition("define ptx_kernel")[2].partition("\n}")[0]
    barriers = [match.start() for match in re.finditer(r"call void @llvm\.nvvm\.barrier", text)]
    put, proxied = text.index("st.volatile.global.v4.u32"), text.index("nvshmemi_transfer_rma_nbi")
    assert barriers[0] < min(put, proxied)
    assert barriers[-1] > max(put, proxied)


def test_values_that_are_kept_over_a_put_stay_in_registers(
    compiled: triton.compiler.CompiledKernel, tmp_path: Path
) -> None:
    used = cross.resources(compiled, tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("exchange", "hidden"),
    [
        *itertools.product(["doubling", "pairs", "halving"], [0, 4096]),
        ("pairs_16bit", 0),
        ("two_shot_16bit", 0),
    ],
)
@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (2, 8), (3, 2)])
def test_all_reduces_over_nodes_put(
    libraries: dict[str, str], exchange: str, nodes: int, local: int, hidden: int, tmp_path: Path
) -> None:
    """They put what the form with stores would store, and read no data before the kernel before them has ended."""
    made = cross.compiled_nodes(exchange, nodes, local, hidden=hidden, puts=True)
    assert "nvshmemi_device_state_d" in made.asm["ptx"]
    before = made.asm["ptx"].partition("griddepcontrol.wait")[0]
    reads = {target for _, target in cross.touched(before, made.src.signature, ("peers", "puts"))}
    assert reads <= {"peers", "puts"}
    used = cross.resources(made, tmp_path)
    assert used["STACK"] <= 256, used
