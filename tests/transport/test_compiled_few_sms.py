"""The kernel of few SMs, compiled for GPUs that are not here: what its PTX and machine code must contain."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cross
from shotcast.collectives.algorithms.few_sms import launch
from shotcast.transport.triton import GPUS
from shotcast.transport.triton.binding import reduction_of
from shotcast.transport.triton.few_sms import _KINDS
from shotcast.wire import REDUCIBLE, Op

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = (
    _KINDS[op].value for op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL)
)
FORMS = [
    (ALL_REDUCE, "bfloat16", 16, 2),
    (ALL_REDUCE, "float32", 16, 8),
    (ALL_REDUCE, "float16", 2, 4),
    (REDUCE_SCATTER, "bfloat16", 16, 8),
    (REDUCE_SCATTER, "float32", 4, 2),
    (ALL_GATHER, "int32", 16, 2),
    (ALL_GATHER, "int32", 1, 8),
    (ALL_TO_ALL, "bfloat16", 16, 8),
    (ALL_TO_ALL, "int32", 16, 2),
]
"""Operation, dtype, unit and ranks."""
WINDOW_PARTS = {ALL_REDUCE: 2, REDUCE_SCATTER: 1, ALL_GATHER: 1, ALL_TO_ALL: 1}


def kernel(
    kind: int, dtype: str, unit: int, world_size: int, capability: int = 90, reduction: str = "sum"
) -> tuple[Any, int, int]:
    """Return the compiled kernel, as a large message launches it, with the words of its tiles and its warps."""
    topology: Any = SimpleNamespace(world_size=world_size, transport=GPUS, max_bytes=64 << 20)
    op = next(op for op, constant in _KINDS.items() if constant.value == kind)
    problem: Any = SimpleNamespace(op=op, topology=topology, nbytes=256 << 20, sizes=(), sms=16)
    shape = launch(problem)
    whole = unit == 16 and reduction in ("sum", "avg") and dtype in (*REDUCIBLE, "int32")
    block = shape.block_words if whole else min(shape.block_words, 64 * shape.num_warps)
    code = reduction_of(dtype, reduction)
    made = cross.compiled_few_sms(kind, dtype, unit, world_size, block, shape.num_warps, capability, reduction=code)
    return made, block, shape.num_warps


@pytest.mark.full
@pytest.mark.parametrize(
    "form",
    [
        (ALL_REDUCE, "bfloat16", 16, 2, "avg", "div.rn.f32"),
        (ALL_REDUCE, "float64", 4, 4, "avg", "div.rn.f64"),
        (REDUCE_SCATTER, "uint8", 16, 8, "max", ""),
    ],
    ids=str,
)
def test_other_reductions(form: tuple[int, str, int, int, str, str], tmp_path: Path) -> None:
    """A tile of numbers that take several registers each is smaller, so that all stay in registers."""
    *call, reduction, division = form
    made, _, warps = kernel(*call, reduction=reduction)  # type: ignore[arg-type]
    counts = cross.instructions(made.asm["ptx"])
    assert [key for key in counts if key.startswith("div.") and key.endswith(("f32", "f64"))] == [division] * bool(
        division
    )
    assert counts["st.release.sys.global.b64"] == 3
    assert not [key for key in counts if key.startswith(("fence", "membar", "fma"))]
    used = cross.resources(made, tmp_path)
    assert used["LOCAL"] == 0
    assert used["REG"] * 32 * warps <= 65536
    assert used["STACK"] <= (400 if call[3] == 8 else 64), "addresses and sizes, and no data"


@pytest.mark.full
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form == FORMS[0] else [pytest.mark.full]) for form in FORMS], ids=str
)
def test_code(form: tuple[int, str, int, int], tmp_path: Path) -> None:
    kind, _, unit, world_size = form
    made, block, warps = kernel(*form)
    ptx, counts = made.asm["ptx"], cross.instructions(made.asm["ptx"])
    # nothing but the addresses of peers is read before the kernel before has ended, and the next one is not let in
    assert counts["griddepcontrol.wait"] == 1
    assert counts["griddepcontrol.launch_dependents"] == 0
    assert set(cross.read_before_waiting(made)) == {("ld.global.b64", "peers")}
    # a release as it enters, one at the end of a call in place, and one for each step, after all warps have stored; and
    # acquires, before a warp loads; no fence
    release, acquire = "st.release.sys.global.b64", "ld.acquire.sys.global.b64"
    assert counts[release] == 3
    assert counts[acquire] == 6
    assert not [key for key in counts if key.startswith(("fence", "membar"))]
    last, stored = ptx.rindex(release), ptx.rindex(f"st.global.{width(unit)}", 0, ptx.rindex(release))
    assert "bar.sync" in ptx[stored:last]
    loaded = ptx.index("ld.global.cg")
    seen = ptx.rindex(acquire, 0, loaded)
    assert "bar.warp.sync" in ptx[seen:loaded]
    assert "bar.sync" not in ptx[seen:loaded], "each warp waits for itself"
    # the window is read past the first cache, by 16 bytes
    accesses = max(1, block // (128 * warps))
    wide = {key: n for key, n in counts.items() if key.startswith("ld.global.cg")}
    if unit == 16:
        assert wide == {"ld.global.cg.v4.b32": WINDOW_PARTS[kind] * (world_size - 1) * accesses}
    machine = cross.machine_instructions(cross.sass(made, tmp_path))
    assert machine["MEMBAR.ALL.SYS"] == 3
    assert not [key for key in machine if key.startswith("FFMA")]
    used = cross.resources(made, tmp_path)
    assert used["LOCAL"] == 0
    assert used["REG"] * 32 * warps <= 65536
    assert used["STACK"] <= (400 if world_size == 8 else 64), "addresses and sizes, and no data"


def width(unit: int) -> str:
    return {16: "v4.b32", 4: "b32", 2: "b16", 1: "b8"}[unit]


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 100, 120])
def test_other_gpus(capability: int, tmp_path: Path) -> None:
    for kind in (ALL_REDUCE, ALL_TO_ALL):
        made, _, warps = kernel(kind, "bfloat16", 16, 4, capability)
        used = cross.resources(made, tmp_path)
        assert (used["LOCAL"], used["REG"] * 32 * warps <= 65536) == (0, True)
