"""The small kernels of a decoding step: under Triton's interpreter against plain torch, and compiled."""

from __future__ import annotations

import inspect
from typing import Any

import decoding_targets as targets
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from quick_interpreter import interpret
from shotcast.kernels.step_fields import FIELDS
from shotcast.kernels.triton import embedding, step_inputs
from shotcast.kernels.triton.embedding import embed_kernel
from shotcast.kernels.triton.logits import TILE, argmax_kernel, concat_kernel
from shotcast.kernels.triton.step_inputs import (
    BatchTensors,
    PackedPrompts,
    UnpackShape,
    unpack_kernel,
    unpack_prompts_kernel,
)
from shotcast.kernels.triton.timestamps import start_kernel, stop_kernel


def test_what_begins_a_step_is_not_overtaken() -> None:
    """Check that later kernels cannot start early: attention reads tables and lengths before it waits."""
    for kernel in (unpack_kernel, unpack_prompts_kernel, embed_kernel):
        assert "PDL" not in kernel.arg_names
    for module in (embedding, step_inputs):
        assert "launch_" not in inspect.getsource(module), "nor is any of their launches asked to overtake"


def test_a_step_is_unpacked() -> None:
    tables = torch.tensor([[3, 9], [5, 8], [1, 0], [6, 6]], dtype=torch.int32)  # the last row belongs to no sequence
    last_tokens = torch.tensor([70, 71, 72, 73])
    packed = [
        (2, 4, 41, 7),  # gets block 7
        (0, 6, -1, -1),  # computes its last sampled token
        (1, 3, 43, -1),
        (3, 0, 0, -1),
        (3, 0, 0, -1),
    ]
    (found,) = interpret(targets.unpacked, 1, torch.tensor(packed, dtype=torch.int32), last_tokens, tables, 4)
    tokens, positions, slots, lengths, rows, after = (tensor.tolist() for tensor in found)
    assert tokens == [41, 70, 43, 0, 0]
    assert positions == [4, 6, 3, 0, 0]
    assert slots == [7 * 4, 9 * 4 + 2, 5 * 4 + 3, 6 * 4, 6 * 4]
    assert lengths == [5, 7, 4, 1, 1]
    assert rows == [2, 0, 1, 3, 3]
    assert after == [[3, 9], [5, 8], [1, 7], [6, 6]]


@pytest.mark.parametrize(("count", "sequences", "num_updates"), [(300, 5, 700), (3, 200, 0), (128, 128, 1)])
def test_a_step_with_prompts_is_unpacked(count: int, sequences: int, num_updates: int) -> None:
    """Cover more updates than a program takes, more sequences than tokens, and none."""
    generator = torch.Generator().manual_seed(count)
    last_tokens = torch.randint(0, 1000, [40], generator=generator)
    ids = torch.randint(-40, 60, [count], generator=generator, dtype=torch.int32)
    rows = torch.randint(0, 40, [sequences], generator=generator, dtype=torch.int32)
    tables = torch.randint(0, 99, (40, 50), generator=generator, dtype=torch.int32)
    offsets = torch.randperm(tables.numel(), generator=generator)[:num_updates]
    blocks = torch.randint(100, 999, [num_updates], generator=generator)
    updates = torch.stack((offsets, blocks), dim=1).int()
    (found,) = interpret(targets.unpacked_prompts, 1, ids, rows, updates, last_tokens, tables)
    tokens, positions, slots, sampled_rows, after = found
    assert tokens.tolist() == [token if token >= 0 else int(last_tokens[-1 - token]) for token in ids.tolist()]
    assert positions.tolist() == list(range(1000, 1000 + count))
    assert slots.tolist() == list(range(2000, 2000 + count))
    assert sampled_rows.tolist() == rows.tolist()
    wanted = tables.clone().view(-1)
    wanted[offsets] = blocks.int()
    assert after.view(-1).equal(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("widths", [(40,), (1500, 1500), (1100, 2048, 3)])
def test_columns_are_joined_and_the_largest_found(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(widths))
    whole = torch.randn(9, sum(widths), generator=generator).to(dtype)
    last = sum(widths) - 1
    whole[1, [3, last]] = 100.0  # of equal ones, the first
    whole[2, last] = 100.0
    whole[3, last] = float("nan")
    whole[4, 5] = float("inf")
    whole[5] = float("-inf")
    whole[6, 1:] = float("-inf")
    whole[7] = -3.0
    whole[8] = torch.where(torch.arange(last + 1) % 2 == 0, -0.0, 0.0)
    parts = [part.contiguous() for part in whole.split(list(widths), dim=1)]
    ((values, best),) = interpret(targets.joined, 1, parts)
    torch.testing.assert_close(values, whole.float(), rtol=0, atol=0, equal_nan=True)
    assert best[:, 1].tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1]
    numbers = best[:, 1] == 1
    assert best[numbers, 0].tolist() == whole.float().argmax(1)[numbers].tolist()
    assert best[1, 0] == 3
    # Without a valid maximum there is still a token in range, since a step that is already planned may look it up.
    assert ((best[:, 0] >= 0) & (best[:, 0] <= last)).all()


def test_columns_are_capped() -> None:
    whole = torch.randn(3, 1500, generator=torch.Generator().manual_seed(1)) * 20 - 50
    ((values, best),) = interpret(targets.joined, 1, list(whole.split([1100, 400], dim=1)), 30.0)
    torch.testing.assert_close(values, 30 * torch.tanh(whole / 30), rtol=1e-6, atol=1e-5)
    assert best[:, 0].tolist() == whole.argmax(1).tolist()


@pytest.mark.parametrize("hidden", [48, 1100])
def test_rows_of_other_ranks_are_zero(hidden: int) -> None:
    weight = torch.arange(1.0, 5 * hidden + 1).view(5, hidden)
    tokens = torch.tensor([9, 10, 14, 15, 0, 12])
    (found,) = interpret(targets.embedded, 1, tokens, weight, 10)
    wanted = torch.zeros(6, hidden)
    wanted[[1, 2, 5]] = weight[[0, 4, 2]]
    assert found.equal(wanted)


def test_spans_add_up() -> None:
    ((totals, took_s),) = interpret(targets.stamped, 1, 3, 0.02)
    (outer_ns, outer), (inner_ns, inner) = totals.tolist()
    assert (outer, inner) == (3, 3)
    assert inner_ns / 1e9 >= 3 * 0.02
    assert inner_ns / 1e9 + 3 * 0.02 <= outer_ns / 1e9 <= took_s


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile(capability: int) -> None:
    target = GPUTarget("cuda", capability, 32)

    def ptx(kernel: object, signature: dict[str, Any], **constexprs: Any) -> str:
        source = ASTSource(kernel, signature=signature | dict.fromkeys(constexprs, "constexpr"), constexprs=constexprs)
        return triton_compile(source, target=target, options={"num_warps": 1}).asm["ptx"]

    longs = dict.fromkeys(("tokens", "positions", "slots", "rows"), "*i64")
    words = {"packed": "*i32", "last_tokens": "*i64", "tables": "*i32", "count": "i32", "blocks": "i32"}
    batch = BatchTensors(**longs, lengths="*i32")
    ptx(unpack_kernel, {**words, "batch": batch}, SHAPE=UnpackShape(FIELDS, 16, 64))
    words = {"packed": PackedPrompts(*["*i32"] * 6), **longs, "last_tokens": "*i64", "tables": "*i32"}
    ptx(unpack_prompts_kernel, {**words, "count": "i32", "sequences": "i32"}, TILE=128)
    pointers = {"parts": "*bf16", "starts": "*i32", "values": "*fp32", "largest": "*fp32", "tokens": "*i32"}
    ptx(concat_kernel, {**pointers, "rows": "i32", "vocab": "i32"}, TILE=TILE, cap=None)
    ptx(argmax_kernel, {"largest": "*fp32", "tokens": "*i32", "best": "*i64", "count": "i32"}, COUNT=128)
    embeds = {"tokens": "*i64", "weight": "*bf16", "out": "*bf16", "start": "i32", "count": "i32"}
    ptx(embed_kernel, embeds, HIDDEN=4096, TILE=1024)
    assert "globaltimer" in ptx(start_kernel, {"started_ns": "*i64", "timer": "i32"})
    assert "globaltimer" in ptx(stop_kernel, {"started_ns": "*i64", "totals": "*i64", "timer": "i32"})
