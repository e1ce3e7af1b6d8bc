"""The memory that a rank needs, and the memory that is free."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotcast.errors import ConfigError
from shotcast.layers.rope import Rope
from shotcast.models.config import ModelConfig
from shotcast.models.families import GEMMA2, GEMMA3, OLMO2, PHI3
from shotcast.models.memory_estimate import available_bytes, kv_bytes_per_token, require_division, weight_bytes
from shotcast.models.presets import PRESETS, preset

TINY = ModelConfig(
    hidden=64,
    intermediate=96,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=128,
    norm_eps=1e-6,
    rope=Rope(1e4),
    max_position=128,
    tied=False,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm="head",
)
OTHERS = [replace(TINY, names=family.names, qk_norm=family.qk_norm) for family in (PHI3, OLMO2, GEMMA2, GEMMA3)]


@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=True), *OTHERS, *PRESETS.values()])
def test_one_rank_holds_all(config: ModelConfig) -> None:
    assert weight_bytes(config, 2) == 2 * config.parameters


@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=True), preset("llama-3.1-405b")])
def test_fp8_takes_a_byte_a_weight_of_layers_and_a_scale_an_output(config: ModelConfig) -> None:
    expected = 0
    for name, shape in config.tensors().items():
        matrix = name.startswith("model.layers.") and len(shape) == 2
        expected += math.prod(shape) + 4 * shape[0] if matrix else 2 * math.prod(shape)
    assert weight_bytes(config, 2, quantization="fp8") == expected


def test_stored_matrices_take_what_they_take_in_the_file() -> None:
    config = replace(TINY, stored_bytes=0.5 + 3 / 128)
    matrices = sum(
        math.prod(shape)
        for name, shape in config.tensors().items()
        if name.startswith("model.layers.") and len(shape) == 2
    )
    plain, stored = weight_bytes(config, 2), weight_bytes(config, 2, quantization="stored")
    scales_of_outputs = weight_bytes(config, 2, quantization="fp8") - plain + matrices
    assert stored == pytest.approx(plain - 2 * matrices + config.stored_bytes * matrices + scales_of_outputs, abs=16)


def test_405b_in_fp8_leaves_room_on_four_gpus() -> None:
    assert weight_bytes(preset("llama-3.1-405b"), 2, 4, quantization="fp8") < 105e9


@pytest.mark.parametrize("tied", [False, True])
def test_the_fullest_stage_counts(tied: bool) -> None:
    config = replace(TINY, tied=tied)
    layer = sum(math.prod(shape) for name, shape in config.tensors().items() if name.startswith("model.layers.0."))
    vocabulary = 128 * 64
    assert weight_bytes(config, 1, 1, 4) == layer + vocabulary + 64
    assert weight_bytes(config, 1, 1, 3) == 2 * layer + vocabulary
    assert weight_bytes(config, 1, 1, 2) == 2 * layer + vocabulary + 64


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(1, 9, 3), (2, 5, 2), (3, 3, 1), (4, 3, 2), (5, 2, 2), (9, 1, 1)]
)
def test_nine_heads_on_any_number_of_ranks(ranks: int, heads: int, kv_heads: int) -> None:
    size = 64 * 2520  # whole units for each of so many ranks
    config = replace(preset("smollm2-135m"), vocab=size, intermediate=size, layers=1)
    hidden, head_dim = config.hidden, config.head_dim
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    expected = attention + 3 * hidden * size // ranks + size // ranks * hidden + 3 * hidden
    assert weight_bytes(config, 1, ranks) == expected


def test_the_widest_part_may_be_the_last() -> None:
    narrow, five = (replace(TINY, intermediate=columns, mlp_bias=False) for columns in (4, 5))
    assert weight_bytes(five, 1, 2) - weight_bytes(narrow, 1, 2) == TINY.layers * 3 * TINY.hidden


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([TINY, replace(TINY, tied=True)]))
def test_more_ranks_hold_no_more_each_and_no_less_together(ranks: int, stages: int, config: ModelConfig) -> None:
    most = weight_bytes(config, 2, ranks, stages)
    assert most * ranks * stages >= 2 * config.parameters
    assert most <= weight_bytes(config, 2, max(1, ranks - 1), stages)
    assert most <= weight_bytes(config, 2, ranks, max(1, stages - 1))


def test_each_stage_has_a_layer() -> None:
    weight_bytes(TINY, 2, 5, 4)  # more ranks than heads
    with pytest.raises(ConfigError, match="4 layers cannot be divided between 5 stages"):
        weight_bytes(TINY, 2, 1, 5)


def test_each_rank_has_a_word() -> None:
    model = replace(TINY, vocab=3)
    require_division(model, 3, 1)
    with pytest.raises(ConfigError, match="3 words cannot be divided between 4 ranks"):
        require_division(model, 4, 1)


def test_keys_and_values_of_a_token() -> None:
    """Check that Llama 3.1 8B keeps 128 KiB a token in bfloat16."""
    assert kv_bytes_per_token(preset("llama-3.1-8b"), 2, 8, 32) == 128 * 1024


GIB = 1 << 30


def machine(root: Path, available: int, cgroup: str, files: dict[str, str]) -> Path:
    contents = {
        "proc/meminfo": f"MemTotal: 1 kB\nMemFree:  5 kB\nMemAvailable:   {available // 1024} kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2, V1 = "0::/job/step\n", "5:cpu,cpuacct:/\n4:memory:/job\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("", {}, 8 * GIB),
        (V2, {}, 8 * GIB),
        (V2, {"job/step/memory.max": "max", "job/step/memory.current": "9"}, 8 * GIB),
        (V2, {"job/step/memory.max": f"{4 * GIB}", "job/step/memory.current": f"{GIB}"}, 3 * GIB),
        (V2, {"job/memory.max": f"{4 * GIB}", "job/memory.current": f"{GIB}"}, 3 * GIB),
        (V2, {"memory.max": f"{2 * GIB}", "memory.current": f"{GIB}"}, GIB),
        (V2, {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}, 0),
        (V2, {"memory.max": f"{20 * GIB}", "memory.current": "0"}, 8 * GIB),
        (
            V2,
            {
                "memory.max": f"{4 * GIB}",
                "memory.current": f"{3 * GIB}",
                "memory.stat": f"active_file 7\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        (
            V1,
            {"memory/job/memory.limit_in_bytes": f"{4 * GIB}", "memory/job/memory.usage_in_bytes": f"{GIB}"},
            3 * GIB,
        ),
    ],
)
def test_memory_of_the_machine_and_of_the_group(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    root = machine(tmp_path, 8 * GIB, cgroup, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert available_bytes(root) == expected


def test_this_machine_has_some() -> None:
    assert (1 << 20) < available_bytes() < (1 << 50)
