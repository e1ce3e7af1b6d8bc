"""The device of an engine, by the GPUs of the machine."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from shotcast.engine.config import EngineConfig
from shotcast.engine.startup import select_device
from shotcast.errors import ConfigError
from shotcast.hardware import detect


@pytest.mark.parametrize(
    ("device", "gpus", "ranks", "local", "chosen"),
    [
        ("auto", 0, 1, None, "cpu"),
        ("auto", 1, 1, None, "cuda"),
        ("auto", 4, 4, None, "cuda"),
        ("auto", 3, 4, None, "cpu"),
        ("auto", 4, 8, "4", "cuda"),  # two machines of four
        ("cpu", 8, 1, None, "cpu"),
        ("cuda", 2, 2, None, "cuda"),
        ("cuda", 1, 8, "4", "cuda"),  # a launcher shows each rank its own
        ("auto", 1, 8, "4", "cpu"),  # or all of them the same
    ],
)
def test_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, ranks: int, local: str | None, chosen: str
) -> None:
    fake_gpus(monkeypatch, gpus, local)
    assert select_device(EngineConfig("m", tensor_parallel=ranks, device=device)).device == chosen


@pytest.mark.parametrize(("gpus", "message"), [(0, "no usable GPU"), (3, "4 ranks on CUDA need as many GPUs, and 3")])
def test_too_few_gpus_for_cuda(monkeypatch: pytest.MonkeyPatch, gpus: int, message: str) -> None:
    fake_gpus(monkeypatch, gpus, None)
    with pytest.raises(ConfigError, match=message):
        select_device(EngineConfig("m", tensor_parallel=2, pipeline_parallel=2, device="cuda"))


def test_gpus_that_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 1, None)
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", "1")
    for device in ("auto", "cuda"):
        assert select_device(EngineConfig("m", tensor_parallel=2, device=device)).device == "cuda"


def test_too_few_gpus_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    fake_gpus(monkeypatch, 1, None)
    with caplog.at_level(logging.WARNING):
        select_device(EngineConfig("m", tensor_parallel=2))
    assert "2 ranks need as many GPUs, and 1 are visible" in caplog.text


def test_a_dtype_that_the_device_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 0, None)
    with pytest.raises(ConfigError, match="dtype on cpu must be one of float32, bfloat16, not 'float16'"):
        select_device(EngineConfig("m", dtype="float16"))


def fake_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, local: str | None) -> None:
    monkeypatch.setattr(detect, "has_cuda_driver", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
