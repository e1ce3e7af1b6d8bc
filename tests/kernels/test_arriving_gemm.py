"""Products whose rows are arriving, compiled for GPUs that are not here: what their code must contain."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from occupancy import Kernel, fits_beside, multiprocessor
from test_large_gemm import WithTma, compiled, needs

import cross
from shotcast.collectives.algorithms.few_sms import launch
from shotcast.kernels.triton import gemm
from shotcast.kernels.triton.arriving_gemm import arriving_gemm_kernel, register_limit
from shotcast.kernels.triton.gemm import GemmConfig
from shotcast.transport.triton import GPUS
from shotcast.transport.triton.few_sms import ALL_GATHER, BESIDE_REGISTERS, BESIDE_WORDS
from shotcast.wire import LaunchShape, Op

BF16, CPU = torch.bfloat16, torch.device("cpu")
ACQUIRE = "ld.acquire.sys.global.b64"


def arriving(config: GemmConfig) -> Any:
    limit = register_limit(WithTma(256, 256, 64, (64, 64, 256), False, True, BF16, 8, True, CPU), config)
    return compiled(config, kernel=arriving_gemm_kernel, registers=limit.get("maxnreg", 0))


@pytest.mark.every(2)
@pytest.mark.parametrize("config", [gemm.FAST, gemm.FAST_ON_FEW[1]], ids=str)
def test_a_tile_is_loaded_behind_the_wait_for_its_rows(config: GemmConfig, tmp_path: Path) -> None:
    kernel = arriving(config)
    ptx = kernel.asm["ptx"]
    found = cross.instructions(ptx)
    # an acquire by every thread, a barrier, and the fence by which the copy engine sees what the threads see
    last = ptx.rindex(ACQUIRE)
    fence = ptx.index("fence.proxy.async;")
    load = ptx.index("cp.async.bulk.tensor.2d.shared")
    assert last < fence < load
    assert "bar.sync" in ptx[last:fence]
    # the kernel before has ended when this one ends, and not when it begins
    assert found["griddepcontrol.wait"] == 1
    assert found["griddepcontrol.launch_dependents"] == 0
    assert ptx.index("griddepcontrol.wait") > ptx.rindex("cp.async.bulk.tensor.2d.global")
    # steps are pipelined as in a product whose rows are there
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", ptx)
    assert not [name for name in found if name.startswith(("cp.async.c", "ld.global.v"))]
    assert needs(kernel, tmp_path).shared_bytes <= multiprocessor((9, 0)).max_block_shared_bytes


@pytest.mark.full
def test_programs_that_bring_rows_of_two_ranks_fit_beside_a_block(tmp_path: Path) -> None:
    product = needs(arriving(gemm.FAST), tmp_path)
    shape = launch_of(24)
    assert shape.block_words <= BESIDE_WORDS
    bringing = cross.compiled_few_sms(
        ALL_GATHER.value,
        "bfloat16",
        16,
        2,
        shape.block_words,
        shape.num_warps,
        registers=BESIDE_REGISTERS,
        announces=True,
    )
    beside = needs(bringing, tmp_path, stack=8)  # an address
    assert fits_beside(
        Kernel(beside.registers, beside.threads, beside.shared_bytes), [(product, 1)], multiprocessor((9, 0))
    )
    counts, ptx = cross.instructions(bringing.asm["ptx"]), bringing.asm["ptx"]
    # the product is let in when the namesakes on all ranks have entered, and is told with a release
    assert counts["griddepcontrol.launch_dependents"] == 1
    assert ptx.index("griddepcontrol.launch_dependents") > ptx.index(ACQUIRE)
    assert counts["st.release.sys.global.b64"] == 3
    assert not [key for key in counts if key.startswith(("fence", "membar"))]


@pytest.mark.parametrize(("capability", "unit"), [(80, 8), (90, 1)])
def test_threads_load_behind_the_wait(capability: int, unit: int) -> None:
    kernel = compiled(gemm.WITHOUT_TMA, False, unit, capability=capability, kernel=arriving_gemm_kernel)
    ptx = kernel.asm["ptx"]
    wide = "cp.async.cg.shared.global" if unit == 8 else "ld.global.b16"
    last = ptx.rindex(ACQUIRE)
    assert last < ptx.index(wide)
    assert "bar.sync" in ptx[last : ptx.index(wide)]
    assert ("griddepcontrol.wait" in ptx) == (capability >= 90)


def launch_of(sms: int) -> LaunchShape:
    topology: Any = SimpleNamespace(world_size=2, transport=GPUS, max_bytes=64 << 20)
    problem: Any = SimpleNamespace(op=Op.ALL_GATHER, topology=topology, nbytes=64 << 20, sizes=(), sms=sms)
    return launch(problem)
