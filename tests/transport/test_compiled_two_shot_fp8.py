"""The kernel of the FP8 transport, compiled for GPUs that are not here.

Counts follow from the source. ``per`` tiles of the message (four of float32, two of 16-bit floats) become one tile of
slot words. A thread quantizes three times: the slice of a peer, in a loop over the peers; its own slice; and the sums.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from test_compiled import Form, narrow, of_kind, waits_for_the_prior_kernel_first

import cross
from shotcast.device.triton.intrinsics import ROWS_FIRST
from shotcast.wire import REDUCIBLE

pytestmark = pytest.mark.long

SHAPES = ((128, 1), (512, 4), (1024, 8))
QUANTISED = 3


def per(form: Form) -> int:
    return 4 if form.dtype == "float32" else 2


def chosen_forms() -> list[Form]:
    """Return each kernel, dtype, unit, number of ranks, shape and architecture, combined with some of the others."""
    made = [Form("two_shot_fp8"), Form("two_shot_fp8_clears", "bfloat16", 16, 8, 512, 4)]
    made += [Form("two_shot_fp8_clears", "float16", 2, 2, 1024, 8, 120)]
    made += [Form("two_shot_fp8", "float32", 4, 3, 1024, 8, 100), Form("two_shot_fp8", "float32", 16, 4, 512, 4, 80)]
    return made


def every_form() -> list[Form]:
    return [
        Form(name, dtype, unit, world_size, *shape, capability)
        for name, dtype, world_size, shape, capability in itertools.product(
            cross.FP8, REDUCIBLE, (2, 3, 4, 8), SHAPES, (80, 90, 100, 120)
        )
        for unit in (16, narrow(dtype))
    ]


def polls_volatile_and_once_a_place(form: Form, folder: Path) -> None:
    """The words of a slot, and its scales, are loaded twice: before the loop, and in it.

    A load that was compiled into two, one of them tested and the other used, would be counted here.
    """
    polled = of_kind(cross.instructions(form.ptx), "ld", "volatile")
    slots = (2 * form.world_size - 1) * form.accesses * 2
    wide = {"v4.b32": 2 * slots} if form.dtype == "float32" else {"v4.b32": slots, "v2.b32": slots}
    assert {key: n for key, n in polled.items() if key != "b64"} == wide
    machine = cross.machine_instructions(cross.sass(form.kernel, folder))
    assert machine["LDG.E.128.STRONG.SYS"] == wide["v4.b32"]


def moves_data_in_16_bytes(form: Form, folder: Path) -> None:
    counts = cross.instructions(form.ptx)
    loaded, stored = of_kind(counts, "ld"), of_kind(counts, "st")
    unit = {16: "v4.b32", 4: "b32", 2: "b16"}[form.unit]
    data = {key: n for key, n in loaded.items() if key not in ("b64", "sys.relaxed.b64")}
    assert data == {unit: 2 * per(form) * form.accesses * 16 // form.unit}, "a peer's slice, and its own"
    scales = f"v{per(form)}.b32"
    narrow_stores = set(stored) - {"b64", "v4.b32", unit, scales}
    assert narrow_stores <= ({"b32", "v2.b32"} if form.name == "two_shot_fp8_clears" else set()), narrow_stores
    if form.unit == 16 and form.name == "two_shot_fp8":
        sent = form.world_size * form.accesses  # to one peer after the other, and then to each
        wanted = Counter({"v4.b32": (per(form) * form.world_size + 1) * form.accesses + sent})
        wanted[scales] += sent
        assert Counter({key: stored[key] for key in set(stored) - {"b64"}}) == wanted


def converts_by_single_instructions_where_there_are_any(form: Form, folder: Path) -> None:
    counts = cross.instructions(form.ptx)
    native = form.capability >= 89
    words = 4 * form.accesses
    assert counts["cvt.rn.satfinite.e4m3x2.f32"] == native * QUANTISED * words * 2
    # from each rank and back from its own sums; then from each other rank
    assert counts["cvt.rn.f16x2.e4m3x2"] == native * 2 * form.world_size * words * 2
    machine = cross.machine_instructions(cross.sass(form.kernel, folder))
    assert bool([key for key in machine if "E4M3" in key]) == native


def adds_in_order_and_divides_exactly(form: Form, folder: Path) -> None:
    counts = cross.instructions(form.ptx)
    values = form.world_size * form.accesses * 16
    adds = counts["add.rn.f32"] + 2 * counts["add.rn.f32x2"]
    # without the GPU's conversion, an addition rounds values below the normal numbers of e4m3
    assert adds == values + (0 if form.capability >= 89 else QUANTISED * form.accesses * 16)
    assert counts["div.rn.f32"] == 2 * QUANTISED * per(form) * form.accesses
    assert not [key for key in counts if key.startswith("fma") or ".ftz" in key or ".approx" in key]
    assert not [key for key in counts if re.match(r"(mad|mul|sub|add|div)\.(?!rn\.f32)[\w.]*f32", key)]


def keeps_rows_in_warps(form: Form, folder: Path) -> None:
    """All tiles have one layout: no value changes threads, and the maximum of a block is found within a warp."""
    layouts = str(form.kernel.asm["ttgir"])
    if form.unit == 16:
        assert "ttg.convert_layout" not in layouts
        tiles = re.findall(r"blocked<\{sizePerThread = \[1, 1, 4\].*?warpsPerCTA = \[([\d, ]+)\]", layouts)
        assert set(tiles) == {f"{form.warps}, 1, 1" if ROWS_FIRST else f"1, {form.warps}, 1"}


def keeps_tiles_in_registers(form: Form, folder: Path) -> None:
    used = cross.resources(form.kernel, folder)
    assert used["LOCAL"] == 0
    assert used["STACK"] <= 24
    assert used["REG"] <= (128 if form.world_size <= 4 else 168 if form.capability >= 89 else 255)


CHECKS = (
    waits_for_the_prior_kernel_first,
    polls_volatile_and_once_a_place,
    moves_data_in_16_bytes,
    converts_by_single_instructions_where_there_are_any,
    adds_in_order_and_divides_exactly,
    keeps_rows_in_warps,
    keeps_tiles_in_registers,
)


@pytest.mark.every(48)
@pytest.mark.parametrize("form", chosen_forms(), ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_form(form: Form, check: Callable[[Form, Path], None], tmp_path: Path) -> None:
    check(form, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_every_form(capability: int, tmp_path: Path) -> None:
    for form in every_form():
        if form.capability == capability:
            for check in CHECKS:
                try:
                    check(form, tmp_path)
                except AssertionError as error:
                    raise AssertionError(f"{form}: {check.__name__}: {error}") from error
