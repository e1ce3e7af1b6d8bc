"""Prompt attention: under Triton's interpreter against attention in float64, and compiled."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import prompt_attention_targets as targets
import pytest
import torch
import triton

import cross
from quick_interpreter import interpret
from shotcast.kernels.step_fields import TILE_FIELDS
from shotcast.kernels.triton import prompt_attention
from shotcast.kernels.triton.prompt_attention import (
    FEW_ROWS,
    FLOAT32_KEYS,
    FLOAT32_ROWS,
    ROWS,
    STAGES,
    PromptShape,
    prompt_kernel,
    tile_options,
    tile_tokens,
)

pytestmark = pytest.mark.long

SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have; for 8.0, those of 8.6 and 8.9."""
TILES = ((ROWS, 128), (FEW_ROWS, 128), (FEW_ROWS, 256), (ROWS, 64), (FEW_ROWS, 64))
"""Rows and head dimensions of tiles."""


@pytest.mark.full
def test_any_step_is_attended_to() -> None:
    interpret(targets.any_step_is_attended_to, 1, 20)


@pytest.mark.parametrize(
    ("tokens", "group", "kv_heads", "head_dim", "dtype", "wanted", "on_hopper"),
    [
        (2048, 4, 8, 128, torch.bfloat16, ROWS // 4, ROWS // 4),
        (512, 4, 2, 128, torch.bfloat16, FEW_ROWS // 4, FEW_ROWS // 4),  # 32 programs of ROWS
        (4224, 4, 1, 128, torch.float16, ROWS // 4, ROWS // 4),  # as many as there are SMs
        (4192, 4, 1, 128, torch.float16, FEW_ROWS // 4, FEW_ROWS // 4),
        (8192, 3, 8, 128, torch.bfloat16, ROWS // 3, ROWS // 3),
        (8192, 4, 8, 192, torch.bfloat16, FEW_ROWS // 4, FEW_ROWS // 4),
        (8192, 4, 8, 256, torch.bfloat16, FEW_ROWS // 4, ROWS // 4),
        (8192, 1, 8, 128, torch.float32, FLOAT32_ROWS, FLOAT32_ROWS),
        (8192, 71, 1, 64, torch.float32, 1, 1),
    ],
)
def test_tiles_fill_the_processors(
    tokens: int, group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, wanted: int, on_hopper: int
) -> None:
    shape = tokens, group, kv_heads, head_dim, dtype, 132
    assert (tile_tokens(*shape, hopper=False), tile_tokens(*shape, hopper=True)) == (wanted, on_hopper)


@pytest.mark.parametrize(
    ("group", "most", "rows", "short"),
    [(4, 32, 128, 16), (8, 8, 64, 16), (1, 128, 128, 16), (20, 6, 128, 32), (71, 1, 128, 128)],
)
def test_few_queries_take_few_rows(
    group: int, most: int, rows: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **options: launched.append(dict(zip(prompt_kernel.arg_names, given, strict=True)))

    monkeypatch.setattr(prompt_attention, "prompt_kernel", Launches())
    monkeypatch.setattr(prompt_attention, "launch_options", lambda device, warps: {"launch_pdl": True})
    queries, cache = torch.zeros(9, group, 64), torch.zeros(32, 1, 64)
    ints = torch.zeros(1, TILE_FIELDS, dtype=torch.int32)
    prompt_attention.attend(queries, cache, cache, ints, ints, most, ints, group, 16, 0, queries)
    assert (rows, short) == (launched[0]["SHAPE"].ROWS, launched[0]["SHAPE"].SHORT_ROWS)


def compiled(
    rows: int,
    head_dim: int,
    dtype: str,
    windowed: bool = False,
    group: int = 4,
    capability: int = 90,
    fp8: bool = False,
) -> Any:
    """Compile the kernel as ``attend`` launches it."""
    keys, stages, warps = tile_options(rows, head_dim, torch.float32 if dtype == "fp32" else torch.bfloat16)
    shape = PromptShape(
        HEADS=2 * group,
        KV_HEADS=2,
        HEAD_DIM=head_dim,
        GROUP=group,
        ROWS=rows,
        SHORT_ROWS=max(16, triton.next_power_of_2(group)),
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=16,
        KEYS=keys,
        STAGES=stages,
        WINDOWED=windowed,
        TILE_FIELDS=TILE_FIELDS,
        PDL=capability >= 90,
    )
    floats, ints = ("queries", "keys", "values", "result"), ("tables", "tiles", "first_heads")
    kinds = dict.fromkeys(floats, f"*{dtype}") | dict.fromkeys(ints, "*i32")
    kinds |= {"scale": "fp32", "blocks": "i32", "window": "i32"}
    if fp8:
        kinds |= dict.fromkeys(("keys", "values"), "*fp8e4nv") | dict.fromkeys(("key_scales", "value_scales"), "*fp32")
    return cross.build_of_kinds(
        prompt_kernel, kinds, shape, warps, capability, {"enable_fp_fusion": True}, (*floats, *ints)
    )


def instances(counts: Counter[str], name: str) -> int:
    """Count the instructions whose names begin with this prefix."""
    return sum(count for found, count in counts.items() if found.startswith(name))


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "head_dim", "dtype", "windowed", "group"),
    [
        (ROWS, 128, "bf16", False, 4),
        (ROWS, 128, "fp16", True, 3),
        (FEW_ROWS, 128, "bf16", False, 4),
        (FEW_ROWS, 64, "bf16", True, 1),
        (FEW_ROWS, 80, "bf16", False, 8),
        pytest.param(FEW_ROWS, 128, "fp16", True, 3, marks=pytest.mark.full),
        pytest.param(ROWS, 64, "bf16", True, 1, marks=pytest.mark.full),
        pytest.param(ROWS, 80, "bf16", False, 8, marks=pytest.mark.full),
    ],
)
def test_hopper_multiplies_from_shared_memory_and_spills_nothing(
    rows: int, head_dim: int, dtype: str, windowed: bool, group: int, tmp_path: Path
) -> None:
    """Check that each loop has its products, and loads keys and values before it and in it, with a tile loaded ahead.

    There are two copies of the loops: tiles of few rows have products of 16, for which Hopper has no wgmma instruction.
    """
    kernel = compiled(rows, head_dim, dtype, windowed, group)
    early, _, late = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert cross.touched(early, kernel.src.signature) == [], "this step's kernels write queries, keys and values"
    assert "griddepcontrol.wait" not in late
    counts = cross.instructions(kernel.asm["ptx"])
    width, short = triton.next_power_of_2(head_dim), 16
    keys, stages, warps = tile_options(rows, head_dim, torch.bfloat16)
    loops, threads = 3 if windowed else 2, 32 * warps
    assert instances(counts, "wgmma.mma_async") == loops * (width // 16 + keys // 16) * rows // (16 * warps)
    assert instances(counts, "mma.sync") == loops * 2 * (keys // 8) * (width // 16) // warps
    assert counts["cp.async.cg.shared.global"] == 2 * loops * 2 * stages * keys * width // 8 // threads
    queries = rows * width // 8 // threads, short * width // 8 // threads
    assert counts["ld.global.v4.b32"] == sum(queries), "queries alone"
    waits = re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", kernel.asm["ptx"])
    assert sorted(waits) == ["0"] * 2 * loops + [str(2 * stages - 4)] * 2 * loops
    found = cross.resources(kernel, tmp_path)
    assert (found["STACK"], found["LOCAL"]) == (0, 0)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("capability", "rows", "head_dim"),
    [
        (80, *TILES[0]),
        *((90, *tiles) for tiles in TILES),
        (100, *TILES[0]),
        (120, *TILES[2]),
        *(pytest.param(sm, *tiles, marks=pytest.mark.full) for sm in (80, 100) for tiles in TILES[1:]),
        *(pytest.param(120, *tiles, marks=pytest.mark.full) for tiles in TILES[:2]),
    ],
)
def test_kernels_compile(capability: int, rows: int, head_dim: int) -> None:
    kernel = compiled(rows, head_dim, "bf16", capability=capability)
    assert "mma" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED[capability]


@pytest.mark.full
@pytest.mark.parametrize(("rows", "head_dim"), TILES)
def test_caches_in_float8_are_read_almost_without_spills(rows: int, head_dim: int, tmp_path: Path) -> None:
    kernel = compiled(rows, head_dim, "bf16", fp8=True)
    assert "cvt.rn.f16x2.e4m3x2" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED[90]
    found = cross.resources(kernel, tmp_path)
    assert (found["STACK"], found["LOCAL"]) == (8 if head_dim == 256 else 0, 0)


@pytest.mark.full
def test_float32_is_multiplied_in_float32(tmp_path: Path) -> None:
    kernel = compiled(FLOAT32_ROWS, 128, "fp32")
    assert "mma" not in kernel.asm["ptx"]
    whole = instances(cross.instructions(kernel.asm["ptx"]), "cp.async.cg")
    assert whole == 2 * 2 * STAGES * FLOAT32_KEYS * 128 // 4 // 128, "no second form where no row is saved"
    found = cross.resources(kernel, tmp_path)
    assert (found["STACK"], found["LOCAL"]) == (0, 0)
