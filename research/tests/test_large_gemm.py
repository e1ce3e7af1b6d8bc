"""research/large_gemm.py: the kernel under Triton's interpreter against float64, and compiled for GPUs."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import large_gemm as gemm
import pytest
import torch
import triton.language as tl
from gemm_targets import GemmCase, excesses, forms
from hypothesis import given
from hypothesis import strategies as st
from large_gemm import GemmConfig, GemmForm, Sizes, gemm_kernel
from occupancy import Kernel, fits_beside, multiprocessor, resident_blocks

import cross
from quick_interpreter import interpret
from shotcast.errors import ConfigError, UnsupportedError

BF16, FP16 = torch.bfloat16, torch.float16
SMALL = GemmConfig(32, 32, 32, 2, 4, group=2)
PERSISTENT = GemmConfig(16, 64, 32, 2, 4, group=3, persistent=True)


def cases() -> list[GemmCase]:
    """Cover both dtypes, all layouts, ends within tiles, several tiles a program, and alignments of every unit."""
    made = []
    launches = itertools.cycle(((SMALL, 3), (PERSISTENT, 3), (PERSISTENT, 1), (PERSISTENT, 200), (None, 3)))
    shapes = itertools.cycle(((48, 64, 80), (100, 40, 72), (33, 65, 17), (1, 1, 1), (70, 36, 20)))
    dtypes = itertools.cycle((BF16, FP16, FP16))
    for a_by_columns, b_by_columns, margin in itertools.product((False, True), (False, True), (0, 8, 4, 3)):
        config, sms = next(launches)
        made.append(GemmCase(*next(shapes), next(dtypes), a_by_columns, b_by_columns, margin, config, sms))
    empty = [GemmCase(m, n, k, config=SMALL) for m, n, k in ((5, 40, 0), (0, 8, 8), (8, 0, 8))]
    return made + empty + [GemmCase(100, 200, 64, config=PERSISTENT)]


def test_as_exact_as_float32_sums_and_nothing_beside_the_output() -> None:
    given = cases()
    (found,) = interpret(excesses, 1, given)
    wrong = [(case, excess) for case, excess in zip(given, found, strict=True) if not excess <= 1]
    assert not wrong


def test_which_products_use_the_copy_engine() -> None:
    given = {
        GemmCase(48, 64, 80): (True, 8),
        GemmCase(48, 64, 80, margin=8): (True, 8),
        GemmCase(48, 64, 80, margin=4): (False, 4),
        GemmCase(48, 64, 81): (False, 1),
        GemmCase(48, 64, 82): (False, 2),
        GemmCase(47, 64, 80): (True, 8),
        GemmCase(47, 64, 80, a_by_columns=True): (False, 1),
        GemmCase(48, 63, 80): (False, 1),
        GemmCase(48, 64, 0): (False, 1),
    }
    (found,) = interpret(forms, 1, list(given))
    assert dict(zip(given, found, strict=True)) == given


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tile_m": 96}, "tile_m is 96; it takes a power of two"),
        ({"tile_n": 512}, "tile_n is 512"),
        ({"tile_k": 8}, "tile_k is 8"),
        ({"warps": 2}, "takes 4 or 8"),
        ({"stages": 1}, "stages is 1; it takes a number from 2 up"),
        ({"padding_bytes": -1}, "padding_bytes is -1"),
        ({"group": 0}, "group is 0"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GemmConfig(**fields)


def test_what_is_not_served_is_refused() -> None:
    a = torch.zeros(4, 8, dtype=BF16)
    with pytest.raises(UnsupportedError, match=r"on a GPU, not torch\.bfloat16 on cpu"):
        gemm.form_of(a, a.t(), a.new_zeros(4, 4))


# -- which launch ------------------------------------------------------------------------------------------------------


def form_of(m: int, n: int, k: int) -> GemmForm:
    return GemmForm(m, n, k, (k, k, n), False, True, BF16, 8, False, torch.device("cpu"))


class WithTma(GemmForm):
    """A form on a GPU that has a copy engine."""

    @property
    def uses_tma(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("sms", "small"), [(132, False), (128, False), (124, True), (116, False), (108, True), (100, False)]
)
def test_smaller_tiles_where_larger_ones_would_leave_programs_idle(sms: int, small: bool) -> None:
    """Check 4096 x 8192: its 1,024 large tiles make 8 to 11 for the busiest of so many programs."""
    form = WithTma(4096, 8192, 8192, (8192, 8192, 8192), False, True, BF16, 8, True, torch.device("cpu"))
    assert gemm.choose_config(form, sms) == gemm.FAST_ON_FEW[small]


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 132))
def test_a_choice_always_fits(m: int, n: int, sms: int) -> None:
    form = WithTma(m, n, 64, (64, 64, n), False, True, BF16, 8, True, torch.device("cpu"))
    for config in (gemm.choose_config(form), gemm.choose_config(form, sms)):
        assert gemm.shared_bytes(config) <= multiprocessor((9, 0)).max_block_shared_bytes
    assert gemm.choose_config(form, sms).persistent
    assert not gemm.choose_config(form).persistent
    assert gemm.choose_config(form_of(m, n, 64)) == gemm.WITHOUT_TMA


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(
    config: GemmConfig,
    tma: bool = True,
    unit: int = 8,
    a_rows_are_k: bool = False,
    b_rows_are_n: bool = True,
    dtype: str = "bf16",
    capability: int = 90,
    kernel: Any = gemm_kernel,
    registers: int = 0,
) -> Any:
    constants = {
        "DTYPE": {"bf16": tl.bfloat16, "fp16": tl.float16}[dtype],
        "A_ROWS_ARE_K": a_rows_are_k,
        "B_ROWS_ARE_N": b_rows_are_n,
        "TMA": tma,
        "UNIT": unit,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "TILE_K": config.tile_k,
        "GROUP": config.group,
        "STAGES": config.stages,
        "PERSISTENT": config.persistent,
    }
    a, b = (config.tile_m, config.tile_k), (config.tile_k, config.tile_n)
    tiles = {
        "a": a[::-1] if a_rows_are_k else a,
        "b": b[::-1] if b_rows_are_n else b,
        "out": (config.tile_m, config.tile_n // 2),
    }
    shape = cross.shape_of(kernel, constants | {"PDL": capability >= 90})
    signature = cross.signature_of(kernel) | dict.fromkeys(("a", "b", "out_stride"), "i64")
    signature["sizes"] = Sizes("i32", "i32", "i32", "i64", "i64")
    if tma:
        signature |= {name: f"tensordesc<{dtype}[{rows}, {columns}]>" for name, (rows, columns) in tiles.items()}
    options = {"launch_pdl": kernel is not gemm_kernel} | ({"maxnreg": registers} if registers else {})
    return cross.build(kernel, signature, {"SHAPE": shape}, config.warps, capability, options)


def needs(kernel: Any, folder: Path, stack: int = 0) -> Kernel:
    """Return what a block of a compiled kernel needs, and check that a thread spills no more than ``stack`` bytes."""
    used = cross.resources(kernel, folder)
    assert used["LOCAL"] == 0
    assert used["STACK"] <= stack
    assert kernel.metadata.global_scratch_size == 0
    return Kernel(used["REG"], 32 * kernel.metadata.num_warps, kernel.metadata.shared)


TMA_CONFIGS = [
    (gemm.FAST, 1),
    (gemm.FAST_ON_FEW[0], 1),
    (gemm.FAST_ON_FEW[1], 1),
    (GemmConfig(64, 64, 32, 3, 4), 7),
    (GemmConfig(64, 64, 64, 3, 4), 4),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("config", "blocks"), TMA_CONFIGS, ids=str)
def test_the_copy_engine_feeds_tensor_cores(config: GemmConfig, blocks: int, tmp_path: Path) -> None:
    """Check for wgmma, one of which runs while the next step is awaited, for TMA, and for what a block needs."""
    kernel = compiled(config)
    found = cross.instructions(kernel.asm["ptx"])
    assert [name for name in found if name.startswith("wgmma.mma_async") and name.endswith("f32.bf16.bf16")]
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", kernel.asm["ptx"])
    copies = Counter(name.split("::")[0] for name in found.elements() if name.startswith("cp.async.bulk.tensor"))
    loads, stores = (copies[f"cp.async.bulk.tensor.2d.{direction}"] for direction in ("shared", "global.shared"))
    assert (loads >= 2 * config.stages, stores >= 2, len(copies)) == (True, True, 2)
    assert not [name for name in found if name.startswith(("cp.async.c", "ld.global", "st.global"))]
    needed = needs(kernel, tmp_path)
    assert 0 <= needed.shared_bytes - gemm.shared_bytes(config) <= 128
    assert resident_blocks(needed, multiprocessor((9, 0))) == blocks


def test_room_beside_the_fastest_for_blocks_that_communicate(tmp_path: Path) -> None:
    """Check that every SM still holds a block of 512 threads with 40 registers and 48 KiB of shared memory."""
    product = needs(compiled(gemm.FAST), tmp_path)
    assert fits_beside(Kernel(40, 512, 48 << 10), [(product, 1)], multiprocessor((9, 0))) == 1


@pytest.mark.parametrize(
    ("a_rows_are_k", "b_rows_are_n", "dtype"),
    [(True, False, "bf16"), pytest.param(False, False, "fp16", marks=pytest.mark.full), (True, True, "fp16")],
)
def test_other_layouts_are_as_fast(a_rows_are_k: bool, b_rows_are_n: bool, dtype: str, tmp_path: Path) -> None:
    for config in (gemm.FAST, gemm.FAST_ON_FEW[0]):
        kernel = compiled(config, a_rows_are_k=a_rows_are_k, b_rows_are_n=b_rows_are_n, dtype=dtype)
        assert needs(kernel, tmp_path).shared_bytes <= multiprocessor((9, 0)).max_block_shared_bytes
        found = cross.instructions(kernel.asm["ptx"])
        assert not [name for name in found if name.startswith(("ld.shared", "cp.async.c"))]


@pytest.mark.every(4)
@pytest.mark.parametrize(("capability", "unit"), [(80, 8), (90, 8), (90, 2), (90, 1), (100, 8), (120, 1)])
def test_threads_load_what_the_copy_engine_does_not_take(capability: int, unit: int, tmp_path: Path) -> None:
    kernel = compiled(gemm.WITHOUT_TMA, False, unit, capability=capability)
    found = cross.instructions(kernel.asm["ptx"])
    assert needs(kernel, tmp_path).shared_bytes <= multiprocessor((8, 0)).max_block_shared_bytes
    wide = "cp.async.cg.shared.global" if unit == 8 else "cp.async.ca.shared.global" if unit == 2 else "ld.global.b16"
    assert found[wide] > 0
    assert not [name for name in found if "bulk.tensor" in name]


@pytest.mark.parametrize("capability", [100, pytest.param(120, marks=pytest.mark.full)])
def test_compiles_for_later_gpus(capability: int, tmp_path: Path) -> None:
    config = gemm.FAST if capability == 100 else GemmConfig(64, 128, 64, 3, 4)
    assert needs(compiled(config, capability=capability), tmp_path).shared_bytes <= 227 << 10
