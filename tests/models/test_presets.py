"""Presets have as many parameters as the published models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shotcast.errors import ConfigError
from shotcast.models.presets import PRESETS, preset

PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
"""Numbers of parameters that huggingface.co shows for the safetensors files."""


def test_parameters_are_those_published() -> None:
    assert {name: config.parameters for name, config in PRESETS.items()} == PARAMETERS


def test_an_unknown_name_is_answered_with_close_ones() -> None:
    with pytest.raises(ConfigError, match=r"'llama-3-8b'; similar names: .*llama-3.1-8b"):
        preset("llama-3-8b")
    with pytest.raises(ConfigError, match=r"accepted: llama-2-7b, .*smollm2-1.7b"):
        preset("?")


def test_a_preset_with_another_number_of_layers() -> None:
    whole = preset("llama-3.1-70b")
    assert preset("llama-3.1-70b:40") == replace(whole, layers=40)
    assert len(preset("llama-3.1-70b:90").tensors()) > len(whole.tensors())
    for wrong in ("", "0", "-1", "4.5", "٣", "1000", "40 ", "40:40"):
        with pytest.raises(
            ConfigError, match=r"the preset llama-3.1-70b and a colon must be followed by a number of layers, 1 to 999"
        ):
            preset(f"llama-3.1-70b:{wrong}")
    with pytest.raises(ConfigError, match=r"no preset 'llama-70b'; similar names: .*llama-3.1-70b"):
        preset("llama-70b:40")
