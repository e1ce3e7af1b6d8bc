"""Products that are summed over the ranks: the kernel by Triton's interpreter, the ways of CPU ranks, and its code."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from summed_targets import (
    CALLS,
    SMALL,
    Case,
    bits,
    chosen,
    chosen_beside_the_library,
    different,
    exact,
    failing,
    measured,
    operands,
    outputs_that_autograd_knows,
    products_of_odd_columns,
    reasons,
    refusals,
    threads,
)

import cross
import shared_ranks
import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.errors import ConfigError
from shotcast.kernels.triton import gemm
from shotcast.kernels.triton.gemm import GemmConfig
from shotcast.overlap import adaptive
from shotcast.transport.triton.matmul_reduce import block_words, blocks_of, call_of, matmul_reduce
from shotcast.wire import ProductOp

BF16, FP16 = torch.bfloat16, torch.float16
CONFIGS = (SMALL, GemmConfig(32, 16, 32, 2, 4, group=1), GemmConfig(16, 32, 16, 2, 4, group=3, persistent=True))


def interpreted(fn: Any, world_size: int, *args: Any, **options: Any) -> list[Any]:
    return interpret(fn, world_size, *args, env=GPU_COLLECTIVES, **options)


# -- values -----------------------------------------------------------------------------------------------------------

ODD = [
    Case("matmul_reduce_scatter", 68, 33, 40, FP16, shift=1),
    Case("matmul_all_reduce", 50, 40, 23, BF16, a_by_columns=True, b_by_columns=False),
    Case("matmul_all_reduce", 1, 2, 8, FP16),
    Case("matmul_reduce_scatter", 36, 16, 0, BF16),
]
"""Rows, columns and depths that do not fill tiles, and operands at odd addresses."""


@pytest.mark.full
@pytest.mark.long
def test_bits_are_those_of_the_product_and_then_the_collective() -> None:
    assert interpreted(bits, 2, ODD[:2], 1) == [2] * 2


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4])
def test_bits_of_odd_shapes(world_size: int) -> None:
    assert interpreted(bits, world_size, ODD, 4) == [4 * len(ODD)] * world_size


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_bits_of_random_shapes(world_size: int) -> None:
    """Random shapes, layouts, alignments and tiles, with stragglers."""
    draw = random.Random(world_size)
    cases = []
    for op in itertools.islice(itertools.cycle(CALLS), 24 if world_size < 5 else 10):
        m, n, k = draw.randint(1, 130), draw.randint(1, 70), draw.choice((0, 1, 8, 17, 48))
        if op == "matmul_reduce_scatter":
            m = -(-m // world_size) * world_size
        layout = draw.random() < 0.5, draw.random() < 0.5, draw.choice((0, 1, 4, 8))
        cases.append(Case(op, m, n, k, draw.choice((BF16, FP16)), *layout, config=draw.choice(CONFIGS)))
    assert interpreted(bits, world_size, cases, 2, timeout_s=900) == [2 * len(cases)] * world_size


@pytest.mark.full
def test_products_beyond_the_workspace_pass_in_pieces() -> None:
    """With 4 KiB, a rank's slots hold a few rows of tiles at a time."""
    cases = [Case("matmul_reduce_scatter", 160, 40, 16), Case("matmul_all_reduce", 150, 33, 16, FP16)]
    assert interpreted(bits, 3, [Case("matmul_reduce_scatter", 162, 40, 16), cases[1]], 2, "cpu", 8 << 10) == [4] * 3
    assert interpreted(bits, 2, cases, 2, "cpu", 4 << 10) == [4] * 2


@pytest.mark.full
def test_as_exact_as_float32_sums_and_roundings() -> None:
    for case in (Case("matmul_all_reduce", 64, 48, 200), Case("matmul_reduce_scatter", 64, 48, 200, FP16)):
        assert max(interpreted(exact, 4, case)) <= 1


CHANGES = {
    "parts are not awaited": (
        "parts, call = sync.await_words(call, slots, stride, offs, masks, 0, False, WORLD, WORLD)",
        "parts = sync.load_parts(call, slots, stride, offs, masks, False, WORLD)",
    ),
    "sums are not awaited": (
        "parts, call = sync.await_words(call, quads, 0, offs, masks, owner, False, 1, WORLD, True)",
        "parts = sync.load_parts(call, quads, 0, offs, masks, False, 1)",
    ),
    "parts are not cleared": ("sync.clear_parts(call, slots, stride, offs, masks, WORLD)", "pass"),
    "sums are not cleared": ("sync.clear_parts(call, quads, 0, offs, masks, 1)", "pass"),
    "the slots of the call before are not cleared": (
        "sync.clear_previous(call, dirty, slots_at, slots_quads, worker, tl.num_programs(0) - 1, SHAPE.BLOCK)",
        "pass",
    ),
    "tiles share a slot": ("slots_quads) + tile * TILE_QUADS", "slots_quads) + tile // 2 * TILE_QUADS"),
    "generations do not take turns": ("sync.slots_offset(call.generation,", "sync.slots_offset(call.generation * 0,"),
}


@pytest.mark.full
def test_the_kernel_unchanged_is_right() -> None:
    assert interpreted(different, 2, "    GATHER: bool\n", "    GATHER: bool\n") == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "parts are not awaited" else [pytest.mark.full]) for name in CHANGES],
)
def test_a_guard_that_is_removed_is_missed(name: str) -> None:
    old, new = CHANGES[name]
    assert sum(interpreted(different, 2, old, new)) > 0


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("rows", ("nbytes",)),
        pytest.param("columns", ("launch",), marks=pytest.mark.full),
        pytest.param("tiles", ("launch",), marks=pytest.mark.full),
        ("group", ("launch",)),
        pytest.param("operation", ("op",), marks=pytest.mark.full),
        pytest.param("plain", ("op",), marks=pytest.mark.full),
    ],
)
def test_ranks_that_make_other_calls_differ(kind: str, fields: tuple[str, ...]) -> None:
    for found in interpreted(failing, 2, "cpu", kind):
        assert isinstance(found["error"], shotcast.CollectiveMismatch), found
        assert set(fields) <= set(found["error"].fields), found["error"]
        assert "matmul_all_reduce(bfloat16, " in str(found["error"])
        assert found["took"] < 60  # of 300
        assert found["again"] is shotcast.CollectiveMismatch


@pytest.mark.timing
@pytest.mark.full
def test_a_rank_that_does_not_come_is_named() -> None:
    found = interpreted(failing, 3, "cpu", "late")
    for rank in (0, 2):
        error = found[rank]["error"]
        assert isinstance(error, shotcast.CollectiveTimeout)
        assert (error.missing, error.op) == ((1,), "matmul_all_reduce")
        assert found[rank]["nan"]
        assert found[rank]["took"] < 60


# -- which way --------------------------------------------------------------------------------------------------------


def test_the_copy_engine_stores_rows_of_any_length() -> None:
    assert interpreted(products_of_odd_columns, 2) == [[True, True]] * 2


@pytest.mark.parametrize("tma", [True, False])
def test_ranks_meet_for_what_is_compiled_and_not_for_shapes(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "has_tma", lambda device: tma)
    form = gemm.GemmForm(1024, 40, 128, (128, 128, 0), False, True, BF16, 2, True, torch.device("cpu"))

    def name(config: GemmConfig = SMALL, op: ProductOp = ProductOp.MATMUL_ALL_REDUCE, **fields: Any) -> str:
        return call_of(op, replace(form, **fields), config, 2, 8 << 20, "bfloat16").form

    assert name() == name(m=2048, n=48, k=64, strides=(64, 64, 0))
    assert (name() == name(unit=1)) == tma  # the copy engine takes rows that end anywhere
    others = [
        *(name(n=n) for n in (36, 34, 33)),  # rows of the output end at other units
        name(replace(SMALL, group=3)),
        name(replace(SMALL, warps=8)),
        name(b_rows_are_n=False),
        name(dtype=FP16),
        name(op=ProductOp.MATMUL_REDUCE_SCATTER),
    ]
    assert len({name(), *others}) == 1 + len(others)


def test_what_is_said_of_calls() -> None:
    (found, _) = interpreted(reasons, 2)
    assert found["float32"].startswith("sequential: own products take bfloat16 and float16, not torch.float32")
    assert "has no fused form: own products take" in found["float32 fused"]
    assert found["bfloat16"] == "auto: not measured yet; the first call measures sequential and fused"
    assert found["bfloat16 fused"] == "served"
    assert "has no way 'plain': chunks of rows are for ranks without a kernel" in found["bfloat16 plain"]


def test_calls_of_shared_communicators_do_not_fill_the_gpu() -> None:
    (found, _) = interpreted(reasons, 2, "cpu", False)
    assert "it fills the GPU while it waits for other ranks" in found["bfloat16 fused"]
    assert "exclusive=True" in found["bfloat16 fused"]


@pytest.mark.full
def test_the_first_call_measures_and_chooses() -> None:
    for found in interpreted(chosen, 2, "cpu"):
        for op in CALLS:
            assert set(found[op].median_us) == {"sequential", "fused"} == set(found[op].predicted_us)
            assert found[op].way in found[op].median_us


def test_ways_of_cpu_ranks_have_equal_bits() -> None:
    results = shared_ranks.run(threads, 2, timeout_s=300)
    pairs = [operands(Case("matmul_reduce_scatter", 520, 48, 40, torch.float32), rank, "cpu") for rank in range(2)]
    exact = sum(a.double() @ b.double() for a, b in pairs).chunk(2)
    for rank, found in enumerate(results):
        for op in CALLS:
            decision = found[op][1]
            assert decision["way"] in ("sequential", "plain")
            assert set(decision["median_us"]) == {"sequential", "plain"} == set(decision["predicted_us"])
        assert torch.allclose(found["matmul_reduce_scatter"][0].double(), exact[rank], atol=1e-4)
        assert torch.equal(found["gradient"], found["wanted gradient"])


@pytest.mark.full
def test_ways_are_compared_only_where_sums_have_one_order() -> None:
    """Let a library sum whose order depends on the size: no way is left out because its bits differ."""
    for found in shared_ranks.run(chosen_beside_the_library, 3, timeout_s=300, env={"SHOTCAST_ALGORITHM": "vendor"}):
        for by_library, decision in found.values():
            assert by_library
            assert set(decision["median_us"]) == {"sequential", "plain"}
            assert not decision["left_out"]


def test_a_decision_serves_about_so_many_rows() -> None:
    for found in shared_ranks.run(measured, 2, timeout_s=300):
        assert (found["calls"], found["all"]) == (1, 2)
        assert found["layer"] == {("forward", 1024, torch.float32): found["last"]}
        assert set(found["explained"].median_us) == {"sequential", "plain"}
        assert found["few"].way == "sequential"
        assert not found["few"].median_us


def test_the_oldest_decisions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "MOST_KEPT", 3)
    known: dict[int, int] = {}
    for number in range(5):
        assert adaptive.remember(known, number, -number) == -number
    assert known == {2: -2, 3: -3, 4: -4}


@pytest.mark.full
def test_autograd_sees_what_is_written() -> None:
    interpreted(outputs_that_autograd_knows, 2, "fused")


def test_autograd_sees_what_cpu_ranks_write() -> None:
    shared_ranks.run(outputs_that_autograd_knows, 2, "plain", timeout_s=300)
    for found in shared_ranks.run(outputs_that_autograd_knows, 2, "sequential", timeout_s=300):
        assert found == dict.fromkeys(CALLS, 0)


def test_operands_that_do_not_fit_are_refused() -> None:
    shared_ranks.run(refusals, 2, timeout_s=300)


tiles = st.sampled_from((16, 32, 64, 128, 256))


@given(
    st.booleans(), st.integers(1, 40_000), st.integers(1, 40_000), st.integers(2, 8), tiles, tiles, st.integers(0, 29)
)
def test_calls_cover_the_rows_of_all_blocks(
    gather: bool, m: int, n: int, world_size: int, tile_m: int, tile_n: int, power: int
) -> None:
    m = m if gather else m * world_size
    config, max_bytes = GemmConfig(tile_m, tile_n), 1 << power
    row = (2 if gather else 1) * world_size * -(-n // tile_n) * tile_n * tile_m * 2
    if row > 2 * max_bytes:
        with pytest.raises(ConfigError, match="a row of tiles takes"):
            blocks_of(gather, m, n, world_size, config, max_bytes)
        return
    blocks = blocks_of(gather, m, n, world_size, config, max_bytes)
    assert blocks.rows * world_size >= m
    assert gather or blocks.rows * world_size == m
    assert blocks.rows % tile_m == 0 or not gather
    assert blocks.room <= max_bytes
    ends = [0]
    for first, rows in blocks.pieces:
        assert first == ends[-1]
        assert rows > 0
        assert row * -(-rows // tile_m) <= blocks.slot_nbytes <= 2 * blocks.room
        ends.append(first + rows)
    assert ends[-1] == blocks.rows


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(
    config: GemmConfig,
    gather: bool,
    world_size: int,
    tma: bool = True,
    unit: int = 8,
    dtype: str = "bf16",
    capability: int = 90,
) -> Any:
    constants = {
        "GATHER": gather,
        "DTYPE": {"bf16": tl.bfloat16, "fp16": tl.float16}[dtype],
        "A_ROWS_ARE_K": False,
        "B_ROWS_ARE_N": True,
        "TMA": tma,
        "UNIT": unit,
        "OUT_UNIT": unit,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "TILE_K": config.tile_k,
        "GROUP": config.group,
        "STAGES": config.stages,
        "WORLD": world_size,
        "BLOCK": block_words(world_size, config),
        "WARPS": config.warps,
    }
    signature = cross.signature_of(matmul_reduce)
    if tma:
        signature["a"] = f"tensordesc<{dtype}[{config.tile_m}, {config.tile_k}]>"
        signature["b"] = f"tensordesc<{dtype}[{config.tile_n}, {config.tile_k}]>"
    shape = {"SHAPE": cross.shape_of(matmul_reduce, constants)}
    return cross.build(matmul_reduce, signature, shape, config.warps, capability, {"launch_pdl": False})


@pytest.mark.full
@pytest.mark.parametrize(
    ("gather", "world_size"),
    [(True, 2), pytest.param(False, 2, marks=pytest.mark.full), pytest.param(True, 8, marks=pytest.mark.full)],
)
def test_the_product_is_as_fast_as_alone(gather: bool, world_size: int, tmp_path: Path) -> None:
    """Check that wgmma of a step runs while the next is awaited, for spills, and for narrow stores."""
    kernel = compiled(gemm.FAST, gather, world_size)
    ptx = kernel.asm["ptx"]
    found = cross.instructions(ptx)
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", ptx)
    assert [name for name in found if name.startswith("cp.async.bulk.tensor.2d.shared")]
    used = cross.resources(kernel, tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["REG"] <= 255
    assert kernel.metadata.shared <= gemm.shared_bytes(gemm.FAST), "it takes no more of an SM than the product"
    # tiles, sums and slots pass by 16 bytes; nothing waits for stores to arrive
    narrow = [name for name in found if re.match(r"(ld|st)\.(volatile\.)?global\.(b16|b32|v2)", name)]
    assert not narrow
    assert found["st.global.v4.b32"] >= 32
    assert not [name for name in found if name.startswith(("membar", "fence.acq_rel", "st.release"))]


@pytest.mark.full
@pytest.mark.parametrize(("capability", "unit"), [(80, 8), (90, 8), (90, 2), (90, 1), (120, 4)])
def test_threads_load_what_the_copy_engine_does_not_take(capability: int, unit: int, tmp_path: Path) -> None:
    for world_size in (2, 3, 8):
        kernel = compiled(gemm.WITHOUT_TMA, True, world_size, False, unit, "fp16", capability)
        assert cross.resources(kernel, tmp_path)["LOCAL"] == 0
        narrow = [name for name in cross.instructions(kernel.asm["ptx"]) if name.startswith("st.global.b16")]
        assert not narrow or unit == 1, "tiles are sent by words"
        assert kernel.metadata.shared <= 99 << 10
