"""Prompt attention for Hopper, compiled, and which steps use it. Its results: ``test_prompt_attention_cuda.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cross
from shotcast.kernels.step_fields import TILE_FIELDS
from shotcast.kernels.triton import hopper_prompt_attention, prompt_attention
from shotcast.kernels.triton.hopper_prompt_attention import (
    COLUMNS,
    STAGES,
    WARPS,
    HopperPromptShape,
    hopper_prompt_kernel,
    keys_at_once,
    piece_layout,
)


def compiled(head_dim: int, dtype: str, windowed: bool, capped: bool) -> Any:
    """Compile the kernel as ``attend`` launches it."""
    shape = HopperPromptShape(16, 4, head_dim, 4, 16, keys_at_once(head_dim), windowed, True)
    floats, ints = ("queries", "result"), ("tables", "tiles", "first_heads")
    kinds = dict.fromkeys(floats, f"*{dtype}") | dict.fromkeys(ints, "*i32")
    piece = f"tensordesc<{dtype}[16, {COLUMNS}],{piece_layout(16)!r}>"
    kinds |= dict.fromkeys(("keys", "values"), piece)
    kinds |= {"scale": "fp32", "window": "i32", "blocks": "i32"} | ({"squash": "fp32"} if capped else {})
    options = {"enable_fp_fusion": True}
    return cross.build_of_kinds(hopper_prompt_kernel, kinds, shape, WARPS, 90, options, (*floats, *ints))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "windowed", "capped"),
    [
        (128, "bf16", False, False),
        pytest.param(128, "fp16", True, True, marks=pytest.mark.full),
        pytest.param(256, "bf16", False, False, marks=pytest.mark.full),
        pytest.param(256, "fp16", True, True, marks=pytest.mark.full),
    ],
)
def test_consumers_multiply_and_the_producer_copies(
    head_dim: int, dtype: str, windowed: bool, capped: bool, tmp_path: Path
) -> None:
    kernel = compiled(head_dim, dtype, windowed, capped)
    ptx = kernel.asm["ptx"]
    early, _, late = ptx.partition("griddepcontrol.wait")
    assert cross.touched(early, kernel.src.signature) == [], "this step's kernels write queries, keys and values"
    assert "griddepcontrol.wait" not in late
    counts, keys = cross.instructions(ptx), keys_at_once(head_dim)
    loops = 3 if windowed else 2
    scores, values = head_dim // 16, keys // 16  # products of a tile
    wgmma = sum(count for name, count in counts.items() if name.startswith("wgmma.mma_async"))
    assert wgmma == 2 * (loops + 1) * (scores + values), "two consumers, in the loops and once before or after them"
    copies = keys // 16 * head_dim // COLUMNS
    bulk = sum(count for name, count in counts.items() if name.startswith("cp.async.bulk.tensor.2d"))
    assert bulk == 5 * copies, "keys of three places, values of two"
    assert "cp.async" not in early
    assert {"setmaxnreg.dec.sync.aligned.u32", "setmaxnreg.inc.sync.aligned.u32"} <= set(counts)
    assert counts["fence.proxy.async.shared::cta"] == 3, "queries of two consumers, and values with rows of zeros"
    assert kernel.metadata.shared <= 227 << 10
    assert 2 * STAGES * keys * head_dim * 2 <= kernel.metadata.shared
    found = cross.resources(kernel, tmp_path)
    assert found["STACK"] == found["LOCAL"] == 0


@pytest.mark.parametrize(
    ("change", "used"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"head_dim": 256}, True),
        ({"window": 100}, True),
        ({"block_size": 128}, True),
        ({"hopper": False}, False),
        ({"interpreted": True}, False),
        ({"tokens": 16}, False),  # tiles of half as many rows
        ({"head_dim": 64}, False),
        ({"head_dim": 192}, False),
        ({"dtype": torch.float32}, False),
        ({"stored": torch.float8_e4m3fn}, False),
        ({"block_size": 48}, False),  # blocks begin in the middle of a tile
        ({"block_size": 4}, False),  # swizzled memory repeats every 8 rows
        ({"head_dim": 256, "block_size": 128}, False),
    ],
    ids=str,
)
def test_the_steps_that_use_it(change: dict[str, Any], used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    class Launches:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **options: launched.append(self.name)

    monkeypatch.setattr(prompt_attention, "prompt_kernel", Launches("any GPU"))
    monkeypatch.setattr(hopper_prompt_attention, "hopper_prompt_kernel", Launches("Hopper"))
    monkeypatch.setattr(prompt_attention, "is_hopper", lambda device: change.get("hopper", True))
    monkeypatch.setattr(prompt_attention, "INTERPRETED", change.get("interpreted", False))
    monkeypatch.setattr(prompt_attention, "stored", lambda *cache: cache)
    for module in (prompt_attention, hopper_prompt_attention):
        monkeypatch.setattr(module, "launch_options", lambda device, warps: {"launch_pdl": True})
    dtype, head_dim = change.get("dtype", torch.bfloat16), change.get("head_dim", 128)
    queries = torch.zeros(40, 4, head_dim, dtype=dtype)
    cache = torch.zeros(256, 1, head_dim).to(change.get("stored", dtype))
    ints = torch.zeros(1, TILE_FIELDS, dtype=torch.int32)
    scales = (torch.ones(256, 1), torch.ones(256, 1)) if "stored" in change else None
    block_size, window = change.get("block_size", 16), change.get("window", 0)
    shape = change.get("tokens", 32), ints, 4, block_size, window
    prompt_attention.attend(queries, cache, cache, ints, ints, *shape, queries, scales=scales)
    assert launched == ["Hopper" if used else "any GPU"]
