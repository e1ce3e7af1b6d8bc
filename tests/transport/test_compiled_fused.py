"""The kernels that norm rows, compiled for GPUs that are not here (see test_compiled.py)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from test_compiled import MAX_STACK, of_kind

import cross
from shotcast.device.triton import tiles
from shotcast.wire import LAYER, LAYER_WITH_BIAS, RMS

pytestmark = pytest.mark.long


class Form(NamedTuple):
    """The parameters that a kernel is compiled for, as ``cross.compiled_fused`` takes them."""

    name: str
    dtype: str = "bfloat16"
    hidden: int = 8192
    quantize: str = ""
    keeps_normed: bool = True
    world_size: int = 4
    capability: int = 90
    multicast: bool = False
    weight: str = ""
    kind: str = RMS
    tile_words: int = 128


LARGE_TILES = [
    Form(name, dtype, quantize=quantize, world_size=2, kind=kind, tile_words=256)
    for name in ("fused_one_shot", "fused_two_shot", "fused_two_shot_clears")
    for dtype, quantize, kind in (("bfloat16", "", RMS), ("bfloat16", "dynamic", LAYER_WITH_BIAS), ("float32", "", RMS))
]
FORMS = [Form(name) for name in ("norm", "fused_two_shot_clears")]
FORMS += [Form(name, quantize="dynamic", keeps_normed=False) for name in ("norm", "fused_two_shot")]
FORMS += [Form(name, "float16", 5120, "static") for name in ("norm", "fused_one_shot")]
FORMS += [Form(name, "float32", 2880, "dynamic", world_size=8) for name in ("fused_one_shot", "fused_two_shot")]
FORMS += [Form("fused_two_shot", hidden=4096, quantize="dynamic", capability=capability) for capability in (80, 120)]
FORMS += [Form("fused_two_shot", quantize="dynamic", capability=100, multicast=True)]
FORMS += [Form("fused_one_shot", weight="float32", kind=LAYER_WITH_BIAS)]
FORMS += LARGE_TILES[:1]
FORMS += [Form(name, "float32", 2880, "dynamic", weight="bfloat16", kind=LAYER) for name in ("norm", "fused_two_shot")]
MORE = [
    Form(name, dtype, hidden, quantize, True, world_size, capability)
    for name in cross.FUSED
    for dtype, hidden in (("bfloat16", 4096), ("bfloat16", 8192), ("float16", 5120), ("float32", 2880))
    for quantize in ("", "dynamic")
    for world_size in (2, 4, 8)
    for capability in (80, 90, 100, 120)
]
MORE += [
    Form(name, dtype, 4096, quantize, weight=weight, kind=kind)
    for name in cross.FUSED
    for dtype, weight in (("bfloat16", "float32"), ("float16", ""), ("float32", "float16"))
    for quantize in ("", "dynamic")
    for kind in (RMS, LAYER_WITH_BIAS)
]
MORE += LARGE_TILES
MORE += [Form("fused_two_shot", quantize="dynamic", multicast=True)]


def name_of(form: Form) -> str:
    return "-".join(str(value) for value in form)


@pytest.mark.every(16)
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_form(form: Form, tmp_path: Path) -> None:
    check(form, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("form", MORE, ids=name_of)
def test_every_form(form: Form, tmp_path: Path) -> None:
    check(form, tmp_path)


def check(form: Form, tmp_path: Path) -> None:
    kernel = cross.compiled_fused(*form)
    ptx = kernel.asm["ptx"]
    counts = cross.instructions(ptx)
    pdl, exchanges = form.capability >= 90, form.name != "norm"
    # programmatic dependent launch: the prior kernel is awaited before anything is read
    assert counts["griddepcontrol.wait"] == pdl
    assert (counts["griddepcontrol.launch_dependents"] > 0) == pdl
    if pdl:
        early = {("ld.global.b64", "peers")} if "shot" in form.name else set()  # the addresses of peers never change
        assert set(cross.read_before_waiting(kernel)) == early
    # tiles move in 16 bytes; single words are control words and scales
    loaded, polled, stored = of_kind(counts, "ld"), of_kind(counts, "ld", "volatile"), of_kind(counts, "st")
    others = {"b32"} if form.quantize == "static" else set()
    if form.weight == "float32":
        others |= {"v2.b64"}  # two words' weights, 16 bytes
    if form.weight == "bfloat16" and exchanges:
        others |= {"v2.b32"}  # the weights of four words of float32, 8 bytes
    assert set(loaded) - {"b64", "sys.relaxed.b64"} == {"v4.b32"} | others
    assert loaded["b32"] <= 1
    assert set(polled) == ({"v4.b32", "b64", "v2.b64"} if exchanges else set())  # words, headers, the epoch
    assert set(stored) <= {"v4.b32", "b64", "b32"} | ({"v2.b32"} if form.quantize else set())
    assert (stored["b32"] > 0) == (form.quantize == "dynamic")
    multicasts = [key for key in counts if key.startswith("multimem")]
    assert multicasts == (["multimem.st.relaxed.sys.global.v4.f32"] if form.multicast else [])
    # exactly the arithmetic that is written
    assert not [key for key in counts if re.match(r"(fma|mad)\.[\w.]*f(32|16)", key)]
    assert {key for key in counts if ".ftz" in key} == {"rsqrt.approx.ftz.f32"}
    assert terms_of_float_sums(kernel.asm["ttgir"]) <= {1, 2}, "layouts decide the order of more"
    short = {"bfloat16": "bf16", "float16": "f16"}.get(form.dtype)
    rounds = {key for key in counts if re.match(r"cvt\.[\w.]*(?<!\.)\.(bf16|f16)(x2)?\.f32", key)}
    assert all(re.fullmatch(rf"cvt\.rn\.{short}(x2)?\.f32", key) for key in rounds), rounds
    assert bool(rounds) == bool(short)
    # rows stay in registers: 16 warps fit in a multiprocessor, or 14 (on 8.0, 12) of programs of one warp with a tile
    used = cross.resources(kernel, tmp_path)
    assert used["LOCAL"] == 0
    if form.world_size == 8:
        registers = 255
    elif form.name.startswith("fused_two_shot") and (form.weight or form.kind != RMS):
        registers = 224
    elif "shot" in form.name:
        registers = 168 if form.capability == 80 else 144
    else:
        registers = 128
    assert used["REG"] <= registers
    wide = form.world_size == 8 and (form.capability == 80 or "shot" not in form.name)
    spilled = 96 if wide else MAX_STACK if "shot" in form.name else 56
    assert used["STACK"] <= spilled


def terms_of_float_sums(ttgir: str) -> set[int]:
    """Return how many terms the floating-point sums of a kernel have that add up along a dimension of a tensor."""
    reductions = re.findall(
        r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32\}> \(\{(.*?)\}\) : \(tensor<((?:\d+x)+)', ttgir, re.S
    )
    sums = {int(shape.split("x")[int(axis)]) for axis, body, shape in reductions if "arith.addf" in body}
    assert sums
    return sums


@pytest.mark.parametrize("words", [1, 4, 16, 250, 256, 257, 2048, 4096, 5000, tiles.MAX_ROW_WORDS])
def test_row_tiles(words: int) -> None:
    """Every thread polls words of its own, 16 bytes from 128 words on: threads that shared words could disagree."""
    block, warps = tiles.row_tile(words)
    assert words <= block < max(2 * words, 17)
    assert block >= 128 * warps or warps == 1
    assert block <= 16 * 32 * warps
