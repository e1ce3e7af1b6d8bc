"""Paged attention for GPUs: under Triton's interpreter against the compiled code of CPU ranks, and compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_attention_targets import LENGTHS, both_ways, cap_matters, in_float8

import cross
from quick_interpreter import interpret
from shotcast.kernels.triton import paged_attention, rope
from shotcast.kernels.triton.paged_attention import (
    SMALL_TILE,
    STAGES,
    TILE,
    WARPS,
    WIDE_STAGES,
    WIDE_TILE,
    DecodeShape,
    PagedDecoding,
    decode_kernel,
    merge_kernel,
    tile_and_stages,
)
from shotcast.kernels.triton.rope import RotateShape, rotate_kernel


@pytest.mark.parametrize(
    ("kv_head_of", "head_dim", "block_size", "window", "dtype", "normed", "num_sms", "close"),
    [
        ((0, 0, 0, 1, 1), 64, 16, 0, "float32", True, 8, 1e-5),
        ((0, 1), 24, 4, 7, "float32", False, 100, 1e-5),
        ((0,) * 16, 128, 16, 0, "bfloat16", False, 8, 2e-2),
        ((0, 0, 1, 1), 64, 16, 40, "float16", True, 1, 4e-3),
    ],
)
def test_kernels_do_what_the_host_does(
    kv_head_of: tuple[int, ...],
    head_dim: int,
    block_size: int,
    window: int,
    dtype: str,
    normed: bool,
    num_sms: int,
    close: float,
) -> None:
    """Cover 2 or 4 parts; many parts, most without tokens; one part, which needs no merge; one or two rotation
    programs."""
    case = kv_head_of, head_dim, block_size, window, dtype, normed, num_sms
    (worst,) = interpret(both_ways, 1, *case, LENGTHS, "cpu", (None, 0.0), close)
    assert worst < close


@pytest.mark.parametrize(
    ("dtype", "num_sms", "close"), [("float32", 1, 1e-3), ("float32", 8, 1e-3), ("bfloat16", 8, 3e-2)]
)
def test_caches_in_float8(dtype: str, num_sms: int, close: float) -> None:
    """Check that both kernels store the same bytes and scales, and what decoding reads."""
    ((off, same),) = interpret(in_float8, 1, dtype, num_sms)
    assert off < close
    assert same


@pytest.mark.full
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_with_caches_in_float8_compile(capability: int, tmp_path: Path) -> None:
    stored = {
        **dict.fromkeys(("keys", "values"), "*fp8e4nv"),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32"),
    }
    kinds = without(KINDS | stored, "norms")
    for kernel, shape in ((decode_kernel, SHAPE), (rotate_kernel, RotateShape(16, 2, 64, 64, 16, True))):
        built = cross.build_of_kinds(kernel, kinds, shape, 4, capability, {}, VECTORS)
        if kernel is decode_kernel:
            assert "cvt.rn.f16x2.e4m3x2" in built.asm["ptx"], "bytes are converted by instructions"
        found = cross.resources(built, tmp_path)
        assert found["STACK"] == found["LOCAL"] == 0


@pytest.mark.parametrize("num_sms", [1, 8])
def test_scores_are_scaled_and_capped(num_sms: int) -> None:
    """Check one part and several, where the new key is scored by itself and by others."""
    case = (0, 0, 1), 24, 4, 20, "float32", False, num_sms
    ((capped, lengths),) = interpret(cap_matters, 1, case, (0.4, 1.5))
    assert capped < 1e-5
    assert lengths > 0.02, "this case would not see a missing cap"


KINDS = {
    **dict.fromkeys(("x", "norms", "keys", "values", "result", "queries", "out"), "*bf16"),
    **dict.fromkeys(("cosines", "sines", "sums", "stats", "partial_out", "partial_stats"), "*fp32"),
    **dict.fromkeys(("tables", "lengths", "first_heads"), "*i32"),
    **dict.fromkeys(("rows", "positions", "slots"), "*i64"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
    **dict.fromkeys(("blocks", "window"), "i32"),
}
FUSION = {"enable_fp_fusion": True}
VECTORS = ("x", "keys", "values", "cosines", "sines", "sums", "stats", "result", "queries")
SHAPE = DecodeShape(16, 2, 64, 64, 16, 16, 32, SMALL_TILE, TILE, STAGES, True)
MERGE = {"HEAD_DIM": 128, "WIDTH": 128, "SPLITS": 32}


def without(kinds: dict[str, str], *names: str) -> dict[str, str]:
    return {name: kind for name, kind in kinds.items() if name not in names}


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile(capability: int) -> None:
    pdl = capability >= 90
    decode = cross.build_of_kinds(decode_kernel, KINDS, replace(SHAPE, PDL=pdl), 4, capability)
    assert "bf16" in decode.asm["ptx"]
    assert "mma" in decode.asm["ptx"], "products of queries and keys go through the tensor cores"
    rotate = cross.build_of_kinds(rotate_kernel, KINDS, RotateShape(16, 2, 64, 64, 16, pdl), 1, capability, FUSION)
    assert "fma" in rotate.asm["ptx"]
    constants = MERGE | {"PDL": pdl}
    signature = {name: KINDS.get(name, "constexpr") for name in merge_kernel.arg_names}
    assert "ex2" in cross.build(merge_kernel, signature, constants, 1, capability).asm["ptx"]


@pytest.mark.full
@pytest.mark.parametrize("splits", [1, 32])
def test_what_attention_loads_before_the_kernel_before_it_has_ended(splits: int) -> None:
    """Check that it loads nothing that this step's kernels write, but the first keys and values of earlier steps."""
    kernel = cross.build_of_kinds(decode_kernel, KINDS, replace(SHAPE, SPLITS=splits), 4, 90, {}, VECTORS)
    early, _, late = kernel.asm["ptx"].partition("griddepcontrol.wait")
    accesses = cross.touched(early, kernel.src.signature)
    assert {name.partition(".")[0] for name, _ in accesses} == {"ld"}
    known = {"cosines", "sines", "tables", "first_heads", "lengths", "rows"}
    assert {argument for _, argument in accesses} == known | {"keys", "values"}
    assert {name for name, argument in accesses if argument in ("keys", "values")} == {"ld.global.v4.b32"}
    assert "griddepcontrol.wait" not in late
    assert cross.instructions(early)["griddepcontrol.launch_dependents"] == 1


def test_parts_are_joined_after_the_wait() -> None:
    signature = {name: KINDS.get(name, "constexpr") for name in merge_kernel.arg_names}
    kernel = cross.build(merge_kernel, signature, MERGE | {"PDL": True}, 4, 90, {})
    early, _, late = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert cross.touched(early, signature) == []
    assert "griddepcontrol.wait" not in late


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("capability", "kib", "kind", "item", "head_dim"),
    [
        (89, 99, "bf16", 2, 128),
        (89, 99, "fp32", 4, 256),
        (90, 227, "bf16", 2, 256),
        (90, 227, "fp32", 4, 128),
        pytest.param(89, 99, "bf16", 2, 256, marks=pytest.mark.full),
        pytest.param(89, 99, "fp32", 4, 128, marks=pytest.mark.full),
        pytest.param(90, 227, "bf16", 2, 128, marks=pytest.mark.full),
        pytest.param(90, 227, "fp32", 4, 256, marks=pytest.mark.full),
    ],
)
def test_tiles_fit_into_shared_memory(capability: int, kib: int, kind: str, item: int, head_dim: int) -> None:
    tile, stages = tile_and_stages(head_dim, item, kib << 10)
    kernel = tiles_compiled(kind, head_dim, tile, stages, capability)
    assert kernel.metadata.shared <= kib << 10
    assert cross.instructions(kernel.asm["ptx"])["cp.async.cg.shared.global"] > 0


def tiles_compiled(kind: str, head_dim: int, tile: int, stages: int, capability: int, first: int = 0) -> Any:
    half = head_dim // 2
    shape = DecodeShape(16, 2, half, half, 16, 16, 2, first or tile, tile, stages, capability >= 90)
    kinds = without(KINDS, "norms") | dict.fromkeys(("x", "keys", "values", "result"), f"*{kind}")
    return cross.build_of_kinds(decode_kernel, kinds, shape, WARPS, capability, {}, VECTORS)


@pytest.mark.parametrize(
    ("kv_heads", "sequences", "dtype", "first", "tile", "stages"),
    [
        (2, 1, torch.bfloat16, SMALL_TILE, SMALL_TILE, STAGES),
        (2, 4, torch.bfloat16, SMALL_TILE, SMALL_TILE, STAGES),  # in 32 parts
        (2, 8, torch.bfloat16, TILE, TILE, STAGES),
        (2, 32, torch.bfloat16, TILE, TILE, STAGES),  # in 4
        (2, 64, torch.bfloat16, TILE, WIDE_TILE, WIDE_STAGES),  # in 2
        (2, 200, torch.bfloat16, TILE, WIDE_TILE, WIDE_STAGES),
        (8, 2, torch.float16, TILE // 2, SMALL_TILE, STAGES),
        (8, 4, torch.float16, TILE, TILE, STAGES),
        (8, 16, torch.float16, TILE, WIDE_TILE, WIDE_STAGES),
        (8, 1, torch.float32, SMALL_TILE, SMALL_TILE, STAGES),  # there is no room for more
        (8, 64, torch.float32, SMALL_TILE, SMALL_TILE, STAGES),
        (1, 160, torch.bfloat16, TILE, WIDE_TILE, WIDE_STAGES),
    ],
)
def test_attention_of_few_sequences_leaves_the_cache_to_products(
    kv_heads: int,
    sequences: int,
    dtype: torch.dtype,
    first: int,
    tile: int,
    stages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches: list[tuple[Any, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launches.append(args)

    monkeypatch.setattr(paged_attention, "decode_kernel", Launched())
    monkeypatch.setattr(paged_attention, "merge_kernel", Launched())
    monkeypatch.setattr(paged_attention, "shared_memory_per_sm", lambda device: 228 << 10)
    monkeypatch.setattr(paged_attention, "launch_options", lambda device, warps: {"launch_pdl": True})
    monkeypatch.setattr(paged_attention, "is_hopper", lambda device: True)
    kv_head_of = tuple(head * kv_heads // 16 for head in range(16))
    x = torch.zeros(sequences, (16 + 2 * kv_heads) * 128, dtype=dtype)
    cache, tables = torch.zeros(1, kv_heads, 128, dtype=dtype), torch.zeros(1, 1, dtype=torch.int32)
    decoding = PagedDecoding(16, 128, kv_head_of, 200, 132, x.device)
    decoding(x, x, x, cache, cache, tables, tables, tables, 16, 0, torch.empty(sequences, 16, 128, dtype=dtype))
    shape = launches[0][-1]
    assert (first, tile, stages) == (shape.FIRST_TILE, shape.TILE, shape.STAGES)


def test_wide_tiles_are_for_groups_and_gpus_whose_registers_hold_them() -> None:
    memory = 227 << 10
    for group, wide, tile in ((16, True, WIDE_TILE), (16, False, TILE), (17, True, TILE)):
        decoding = PagedDecoding(group, 128, (0,) * group, 200, 132, torch.device("cpu"))
        assert decoding.tiles(200, torch.bfloat16, memory, wide)[1] == tile


class Launches:
    """A stand-in for a kernel that records its launches, as (grid, arguments by name, options)."""

    def __init__(self, kernel: Any):
        self.names = kernel.arg_names
        self.seen: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **options: Any) -> None:
            self.seen.append((grid, dict(zip(self.names, given, strict=True)), options))

        return launch


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "partial_out", "count", "warps"),
    [(64, 8, 128, 5, 16, 4), (8, 2, 128, 1, 16, 4), (9, 3, 64, 1, 16, 2), (3, 1, 24, 1, 8, 1), (71, 1, 64, 3, 32, 4)],
)
def test_heads_are_turned_together(
    heads: int,
    kv_heads: int,
    head_dim: int,
    partial_out: int,
    count: int,
    warps: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Check for 16-byte accesses of 16-bit values, and no more programs than these need."""
    launches = Launches(rotate_kernel)
    monkeypatch.setattr(rope, "rotate_kernel", launches)
    monkeypatch.setattr(rope, "launch_options", lambda device, warps: {"launch_pdl": True, "num_warps": warps})
    x = torch.zeros(5, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16)
    queries, cache = torch.zeros(5, heads, head_dim), torch.zeros(9, kv_heads, head_dim)
    rope.rotate_into_cache(x, x, x, x, x, cache, cache, queries)
    ((grid, given, options),) = launches.seen
    assert (grid, given["SHAPE"].HEADS_TILE, options["num_warps"]) == ((5, partial_out), count, warps)
    kernel = cross.build_of_kinds(rotate_kernel, without(KINDS, "norms"), given["SHAPE"], warps, 90, {}, VECTORS)
    used = cross.resources(kernel, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    counts = cross.instructions(kernel.asm["ptx"])
    if head_dim % 16 == 0:
        assert counts["st.global.v4.b32"] == 6, "halves of queries, of keys and of values"


@pytest.mark.full
def test_small_tiles_take_little_shared_memory() -> None:
    """Check that four programs leave 64 KB of an SM's 256 to the cache; with larger tiles, two use nearly all of it."""
    assert tiles_compiled("bf16", 128, SMALL_TILE, STAGES, 90).metadata.shared < 48 << 10
    assert tiles_compiled("bf16", 128, TILE, STAGES, 90).metadata.shared > 80 << 10


@pytest.mark.full
def test_a_processor_has_room_for_two_programs_with_wide_tiles(tmp_path: Path) -> None:
    kernel = tiles_compiled("bf16", 128, WIDE_TILE, WIDE_STAGES, 90, TILE)
    assert 2 * (kernel.metadata.shared + (1 << 10)) <= 228 << 10
    used = cross.resources(kernel, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert 2 * 32 * WARPS * used["REG"] <= 1 << 16
