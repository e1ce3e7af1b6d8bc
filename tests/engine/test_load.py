"""Loading of a rank: workspaces, and the GPUs that FP8 needs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import load_targets as targets
import pytest
import torch

from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.collectives.communicator import MAX_WORKSPACE_MESSAGE
from shotcast.engine import load
from shotcast.engine.config import EngineConfig
from shotcast.engine.load import _MIN_WORKSPACE as LEAST
from shotcast.engine.load import _require_float8, _workspace_bytes, stored_formats
from shotcast.errors import UnsupportedError
from shotcast.layers.quantized import BlockRows, Float8Rows, GroupedRows
from shotcast.models.presets import preset
from shotcast.transport.triton.layout import WorkspaceLayout

LARGE = 4 << 20
"""The longest message within a stage in these tests."""


@pytest.mark.parametrize(
    ("device", "tokens", "sequences", "expected"),
    [
        ("cpu", 64, 64, 1 << 20),
        ("cpu", 4096, 64, 4096 * 4096 * 2),
        ("cuda", 128, 64, 64 * 128256 * 2),
        ("cuda", 1024, 4, 2048 * 4096 * 2),
        ("cuda", 4096, 4096, MAX_WORKSPACE_MESSAGE),
    ],
)
def test_a_workspace_holds_the_longest_message_up_to_the_limit(
    device: str, tokens: int, sequences: int, expected: int
) -> None:
    config = EngineConfig("m", device=device, max_num_batched_tokens=tokens, max_num_seqs=sequences)
    model = preset("llama-3.1-8b")
    assert (model.hidden, model.vocab) == (4096, 128256)
    assert _workspace_bytes(config, model, torch.bfloat16) == expected


def test_steps_of_prompts_alone_are_larger_on_gpus_without_a_pipeline() -> None:
    settings = [("cpu", 1), ("cuda", 1), ("cuda", 2)]
    steps = [EngineConfig("m", device=device, pipeline_parallel=stages).max_step_tokens for device, stages in settings]
    assert steps == [2048, 4096, 2048]


@pytest.mark.parametrize(
    ("tensor", "stages", "expected"), [(2, 1, (LARGE, LARGE)), (2, 2, (LEAST, LARGE)), (1, 2, (LEAST, LEAST))]
)
def test_only_ranks_that_share_layers_take_a_large_workspace(
    tensor: int, stages: int, expected: tuple[int, int]
) -> None:
    """GPU workspaces are proportional to the message, while those of compiled CPU ranks end at about 4 MiB."""
    found = interpret(
        targets.workspace_bytes, tensor * stages, tensor, stages, LARGE, env=GPU_COLLECTIVES, timeout_s=300
    )
    assert found == [tuple(WorkspaceLayout.for_messages(max_bytes).nbytes for max_bytes in expected)] * (
        tensor * stages
    )


def test_a_single_rank_is_not_limited_by_its_workspace() -> None:
    interpret(targets.norm_on_one_rank, 1, "ring", env=GPU_COLLECTIVES, timeout_s=300)


@pytest.mark.full
def test_messages_between_stages_may_be_longer_than_their_workspace() -> None:
    interpret(targets.pass_to_next_stage, 4, 2, 2, LEAST + 4096, env=GPU_COLLECTIVES, timeout_s=300)


@pytest.mark.parametrize("found", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_fp8_needs_a_gpu_of_capability_8_9(found: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    refusal = pytest.raises(UnsupportedError, match=r"A GPU has 8\.[06]")
    with refusal if found < (8, 9) else contextlib.nullcontext():
        _require_float8(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("options", "dtype", "capability", "kept"),
    [
        ({}, torch.bfloat16, (9, 0), (GroupedRows, Float8Rows)),
        ({}, torch.float16, (9, 0), (GroupedRows,)),
        ({}, torch.bfloat16, (8, 0), (GroupedRows,)),
        ({"quantization": "fp8"}, torch.bfloat16, (9, 0), (Float8Rows,)),
        ({"device": "cpu"}, torch.bfloat16, (9, 0), ()),
        ({"device": "cpu"}, torch.float32, (9, 0), (BlockRows,)),
        ({}, torch.float32, (9, 0), ()),
    ],
)
def test_formats_that_devices_keep(
    options: dict[str, Any],
    dtype: torch.dtype,
    capability: tuple[int, int],
    kept: tuple[type, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = EngineConfig(**{"model": "random:llama-3.1-8b", "device": "cuda", **options})
    assert stored_formats(config, dtype) == kept


@pytest.mark.parametrize(("device", "share"), [("cuda", 0.25), ("cpu", 1.0)])
def test_the_budget_counts_matrices_as_they_are_kept(
    device: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(load.MemoryBudget, "find", lambda config, memory, sharers, weights, name: found.append(weights))
    monkeypatch.setattr(load, "ranks_of_a_gpu", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = preset("llama-3.1-405b")
    for stored_bytes in (None, 0.5):
        config = EngineConfig("random:llama-3.1-405b", device=device, dtype="bfloat16")
        load._memory_budget(config, replace(model, stored_bytes=stored_bytes), torch.bfloat16)
    plain, stored = found
    assert stored / plain == pytest.approx(share, rel=0.05)
