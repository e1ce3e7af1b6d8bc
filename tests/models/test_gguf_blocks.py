"""Layers that keep the blocks of GGUF files: products with their values, in a fraction of the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf_file import FFN, FLOATS, HIDDEN, NAMES, VOCAB, write

from shotcast.kernels.block_formats import BLOCKS
from shotcast.kernels.cpu import blocks
from shotcast.layers.linear import Linear, RowShard, column_parallel
from shotcast.layers.quantized import BlockRows
from shotcast.layers.weights import Weights
from shotcast.models.gguf_file import GgufFile

CPU = torch.device("cpu")


def random_rows(kind: str, outputs: int, inputs: int, seed: int = 0) -> BlockRows:
    numbers = np.random.default_rng(seed)
    block, nbytes = BLOCKS[kind]
    stored = numbers.integers(0, 256, (outputs, inputs // block, nbytes), dtype=np.uint8)
    places = FLOATS.get(kind, slice(0, 4 if kind == "Q4_1" else 2))
    count = (places.stop - places.start) // 2
    scales = numbers.standard_normal((outputs, inputs // block, count)) * 10.0 ** numbers.integers(-7, 2)
    stored[..., places] = scales.astype(np.float16).view(np.uint8)
    return BlockRows(torch.from_numpy(stored.reshape(outputs, -1)), kind)


def values_of(rows: BlockRows) -> torch.Tensor:
    return torch.from_numpy(dequantize(rows.stored.numpy(), GGMLQuantizationType[rows.kind]))


def assert_close(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare sums that may cancel with the largest of them."""
    torch.testing.assert_close(out, wanted, rtol=0, atol=float(1e-6 * wanted.abs().max()))


def test_the_sizes_of_blocks_are_those_of_the_format() -> None:
    assert {kind: GGML_QUANT_SIZES[GGMLQuantizationType[kind]] for kind in BLOCKS} == BLOCKS


@pytest.mark.parametrize("kind", BLOCKS)
@settings(max_examples=20)
@given(outputs=st.integers(1, 9), blocks_of_row=st.integers(1, 5), seed=st.integers(0, 1000))
def test_values_have_the_bits_of_the_gguf_package(kind: str, outputs: int, blocks_of_row: int, seed: int) -> None:
    rows = random_rows(kind, outputs, blocks_of_row * BLOCKS[kind][0], seed)
    assert torch.equal(rows.values(torch.float32).view(torch.int32), values_of(rows).view(torch.int32))
    chosen = torch.tensor([outputs - 1, 0])
    assert torch.equal(rows.values(torch.bfloat16, chosen), values_of(rows)[chosen].bfloat16())


@pytest.mark.parametrize("scale", [float("inf"), float("-inf"), float("nan"), 0.0, 6e-8, -65504.0])
def test_scales_of_every_kind_of_number(scale: float) -> None:
    rows = random_rows("Q8_0", 1, 32)
    rows.stored[0, :2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    with np.errstate(invalid="ignore"):
        torch.testing.assert_close(rows.values(torch.float32), values_of(rows), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 5, 32, 40])
@pytest.mark.parametrize("kind", BLOCKS)
def test_products_are_those_with_values(kind: str, rows: int, dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    stored = random_rows(kind, 70, 512)
    x, bias = torch.randn(rows, 512).to(dtype), torch.randn(70).to(dtype) if with_bias else None
    out = Linear(stored, bias)(x)
    assert out.dtype == dtype
    values = values_of(stored)
    if rows > blocks.MAX_ROWS:
        assert torch.equal(out, Linear(values.to(dtype), bias)(x))
    wide = x.double(), values.double()
    wanted = F.linear(*wide, None if bias is None else bias.double())
    size = F.linear(wide[0].abs(), wide[1].abs())  # by which sums that cancel are to be judged
    tolerance = 3e-7 if dtype == torch.float32 else 1e-2
    assert ((out.double() - wanted).abs() <= tolerance * (size + wanted.abs() + 1)).all()


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(list(BLOCKS)),
    rows=st.integers(1, blocks.MAX_ROWS),
    outputs=st.integers(1, 9),
    blocks_of_row=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_bits_of_a_row_do_not_depend_on_the_others(
    kind: str, rows: int, outputs: int, blocks_of_row: int, seed: int
) -> None:
    stored = random_rows(kind, outputs, blocks_of_row * BLOCKS[kind][0], seed)
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, stored.shape[1]), np.float32))
    out = blocks.linear(x, *stored)
    for row in range(rows):
        alone = blocks.linear(x[row : row + 1], *stored)
        assert torch.equal(out[row : row + 1].view(torch.int32), alone.view(torch.int32))


def test_a_large_matrix_is_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, x, bias = random_rows("Q4_1", 70, 512), torch.randn(33, 512), torch.randn(70)
    made = []
    one = blocks._into
    monkeypatch.setattr(blocks, "_into", lambda out, *rest: made.append(len(out)) or one(out, *rest))
    monkeypatch.setattr(blocks, "_AT_ONCE", 32 * 512)
    out = blocks.linear(x, *stored, bias)
    assert made == [32, 32, 6]
    wanted = F.linear(x, values_of(stored), bias)
    torch.testing.assert_close(out, wanted, rtol=0, atol=float(1e-5 * wanted.abs().max()))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_divide_the_outputs(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, x = random_rows("Q4_K", 11, 256), torch.randn(2, 256)
    alone, before = blocks.linear(x, *stored), torch.get_num_threads()
    monkeypatch.setattr(blocks, "_THREADS_FROM", 0)
    torch.set_num_threads(threads)
    try:
        out, values = blocks.linear(x, *stored), stored.values(torch.float32)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, alone)
    assert torch.equal(values, values_of(stored))


def loaded(path: Path, keeps: bool) -> tuple[GgufFile, Weights]:
    checkpoint = GgufFile(path)
    return checkpoint, Weights(checkpoint, torch.float32, CPU, stored=(BlockRows,) if keeps else ())


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_layers_of_a_file_keep_its_blocks(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", kind)
    kept, values = (loaded(tmp_path / "m.gguf", keeps)[1] for keeps in (True, False))
    shards = [
        RowShard(NAMES["blk.0.attn_q.weight"].removesuffix(".weight"), range(64, 256)),  # whose rows are interleaved
        RowShard(NAMES["blk.0.attn_k.weight"].removesuffix(".weight"), range(32, 64)),
    ]
    down, columns = NAMES["blk.0.ffn_down.weight"], slice(256, 512)
    table = NAMES["token_embd.weight"]
    x = torch.randn(3, HIDDEN)
    joined = column_parallel(kept, shards)
    assert_close(joined(x), column_parallel(values, shards)(x))
    part = kept.load_matrix(down, None, columns)
    assert_close(Linear(part)(x), Linear(values.load_matrix(down, None, columns))(x))
    assert not Linear(kept.load_matrix(down, None, columns, zeroed=True))(x).any()
    looked_up = kept.load_table(table, slice(8, VOCAB))
    assert isinstance(looked_up, BlockRows)
    assert torch.equal(looked_up.values(torch.float32), values.load_table(table, slice(8, VOCAB)))
    block, nbytes = BLOCKS[kind]
    assert joined.weight.nbytes == (192 + 32) * HIDDEN // block * nbytes  # not 4 bytes a weight
    assert isinstance(part, BlockRows)
    assert part.stored.nbytes == HIDDEN * 256 // block * nbytes


def test_parts_of_blocks_are_values(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q6_K")
    checkpoint, kept = loaded(tmp_path / "m.gguf", True)
    down = NAMES["blk.0.ffn_down.weight"]
    for columns in (slice(0, 128), slice(128, 512), slice(128, FFN - 128)):
        assert checkpoint.read_stored(down, None, columns) is None
        assert torch.equal(kept.load_matrix(down, None, columns), checkpoint.read(down, None, columns))
    assert checkpoint.read_stored(NAMES["output_norm.weight"]) is None


def test_matrices_in_different_blocks_are_joined(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q4_1")
    checkpoint, kept = loaded(tmp_path / "m.gguf", True)
    query, key = (NAMES[f"blk.0.attn_{name}.weight"] for name in "qk")
    checkpoint._tensors[key] = GgufFile(other(tmp_path))._tensors[key]
    joined = column_parallel(kept, [RowShard(name.removesuffix(".weight"), range(64)) for name in (query, key, query)])
    values = torch.cat([checkpoint.read(name, slice(0, 64)) for name in (query, key, query)])
    for x in torch.randn(1, HIDDEN), torch.randn(blocks.MAX_ROWS + 1, HIDDEN):
        assert_close(joined(x), F.linear(x, values))
        assert_close(Linear(joined_parts(kept, query, key), torch.ones(128))(x), F.linear(x, values[:128]) + 1)


def joined_parts(weights: Weights, *names: str) -> list[BlockRows]:
    return [part for name in names if isinstance(part := weights.load_matrix(name, slice(0, 64)), BlockRows)]


def test_matrices_of_which_some_are_not_in_blocks_are_joined_as_values(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q4_1")
    checkpoint, kept = loaded(tmp_path / "m.gguf", True)
    query, key = (NAMES[f"blk.0.attn_{name}.weight"] for name in "qk")
    checkpoint._tensors[key] = GgufFile(other(tmp_path, "F16"))._tensors[key]
    joined = column_parallel(kept, [RowShard(name.removesuffix(".weight"), range(64)) for name in (query, key)])
    assert torch.equal(joined.weight, torch.cat([checkpoint.read(name, slice(0, 64)) for name in (query, key)]).float())


@pytest.mark.parametrize(("kind", "nbytes"), [("Q4_1", 20 / 32), ("Q6_K", 210 / 256), ("F16", None), ("Q5_0", None)])
def test_memory_is_estimated_as_blocks_where_all_matrices_stay_so(
    kind: str, nbytes: float | None, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", kind)
    config = GgufFile(tmp_path / "m.gguf").config
    assert (config.stored_bytes, config.stored_on) == (nbytes, "cpu")


def other(folder: Path, kind: str = "Q8_0") -> Path:
    write(folder / "other.gguf", kind)
    return folder / "other.gguf"
