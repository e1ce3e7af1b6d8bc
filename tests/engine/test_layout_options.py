"""Layouts as options: in one word or two, and never twice."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from shotcast.engine.config import EngineConfig
from shotcast.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"layout": "auto", "tensor_parallel": 1},
            "layout auto and tensor_parallel x pipeline_parallel (1 x 1) both say",
        ),
        ({"layout": "auto", "pipeline_parallel": 2}, "(1 x 2) both say how the ranks are divided; give one of them"),
        ({"layout": "4x2", "tensor_parallel": 4}, "layout 4x2 and tensor_parallel"),
        ({"layout": "4by2"}, "a layout must be auto, auto:N for N ranks, or TxP"),
        ({"layout": "auto:0"}, "not 'auto:0'"),
        ({"layout": 4}, "layout must be a string, not 4"),
        ({"layout": "1000x2"}, "above 1024 ranks"),
        ({"target": "latency"}, "target is what layout auto plans for"),
        ({"layout": "2x1", "workload": "1+2"}, "workload is what layout auto plans for"),
        ({"layout": "auto", "workload": "512"}, "such as 2048+128, not '512'"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        EngineConfig.from_options("m", **options)


def test_a_layout_in_one_word() -> None:
    config = EngineConfig("m", layout="4x2")
    assert (config.tensor_parallel, config.pipeline_parallel, config.ranks) == (4, 2, 8)
    assert replace(config, device="cpu") == EngineConfig("m", layout="4x2", device="cpu")
    with pytest.raises(ConfigError, match="layout 4x2 and"):
        EngineConfig("m", layout="4x2", tensor_parallel=2)
    with pytest.raises(ConfigError, match="layout auto and"):
        EngineConfig("m", layout="auto", tensor_parallel=2)
