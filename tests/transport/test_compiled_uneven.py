"""The kernel for parts of any sizes, compiled for GPUs that are not here: what its PTX and machine code have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cross
from shotcast.collectives.algorithms.one_shot import ALGORITHM
from shotcast.transport.triton import GPUS
from shotcast.wire import LaunchShape, Op

FORMS = [
    ("bfloat16", 16, 2, 90),
    ("bfloat16", 16, 8, 90),
    ("bfloat16", 2, 4, 90),
    ("int32", 16, 2, 90),
    ("int32", 1, 8, 90),
    ("float32", 4, 3, 90),
    ("bfloat16", 16, 4, 80),
    ("bfloat16", 16, 4, 100),
    ("bfloat16", 16, 4, 120),
]
"""Dtype, unit, ranks and compute capability."""


def shape_of(world_size: int) -> LaunchShape:
    topology: Any = SimpleNamespace(world_size=world_size, transport=GPUS, max_bytes=64 << 20)
    problem: Any = SimpleNamespace(topology=topology)
    launch = ALGORITHM.forms[Op.ALL_TO_ALL_UNEVEN].launch
    assert launch is not None
    return launch(problem)


@pytest.mark.full
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form == FORMS[0] else [pytest.mark.full]) for form in FORMS], ids=str
)
def test_code(form: tuple[str, int, int, int], tmp_path: Path) -> None:
    dtype, unit, world_size, capability = form
    shape = shape_of(world_size)
    made = cross.compiled_uneven(dtype, unit, world_size, shape.block_words, shape.num_warps, capability)
    counts = cross.instructions(made.asm["ptx"])
    if capability >= 90:
        # only the addresses of peers are read before the kernel before has ended; every program lets the next in
        assert counts["griddepcontrol.wait"] == 1
        assert counts["griddepcontrol.launch_dependents"] == 2
        assert set(cross.read_before_waiting(made)) == {("ld.global.b64", "peers")}
    assert counts["st.release.sys.global.b64"] == 2, "on entering the window, and after each step"
    assert counts["ld.acquire.sys.global.b64"] == 4
    assert not [key for key in counts if key.startswith(("fence", "membar"))]
    if unit == 16:
        words = shape.block_words // (32 * shape.num_warps)
        assert counts["ld.global.cg.v4.b32"] == world_size * words // 4, "the window is read past the first cache"
    used = cross.resources(made, tmp_path)
    assert used["LOCAL"] == 0
    assert used["STACK"] <= 24, "addresses, and no data"
    assert used["REG"] * 32 * shape.num_warps <= 65536


@pytest.mark.parametrize("world_size", range(2, 9))
def test_chunks_fill_the_window(world_size: int) -> None:
    shape = shape_of(world_size)
    taken = shape.programs * 3 * world_size * shape.chunk_bytes
    assert 8 << 20 <= taken <= 16 << 20
    assert shape.chunk_bytes % (4 * shape.block_words) == 0
