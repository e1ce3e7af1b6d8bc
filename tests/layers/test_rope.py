"""Rotary angles, against those of Hugging Face Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shotcast.errors import ConfigError
from shotcast.layers.rope import ROPE_TYPES, Rope

HEAD_DIM = 64
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SHORT, LONG = [1.0 + i / 32 for i in range(32)], [2.0 + i / 16 for i in range(32)]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.25}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}


def reference(
    theta: float, kind: str, options: dict[str, Any], positions: int, max_position: int = 16384
) -> tuple[torch.Tensor, torch.Tensor]:
    scaling = {"rope_type": kind, **options} if kind != "default" else None
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_theta=theta,
        rope_scaling=scaling,
    )
    if hasattr(config, "rope_parameters"):  # since version 5
        config.rope_parameters = {"rope_type": kind, "rope_theta": theta, **options}
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    assert torch.equal(cosines[..., : HEAD_DIM // 2], cosines[..., HEAD_DIM // 2 :])
    return cosines[0, :, : HEAD_DIM // 2], sines[0, :, : HEAD_DIM // 2]


@pytest.mark.parametrize(
    ("theta", "kind", "options", "rope"),
    [
        (10000.0, "default", {}, Rope(10000.0)),
        (1e6, "linear", {"factor": 2.0}, Rope(1e6, "linear", factor=2.0)),
        (500000.0, "llama3", LLAMA3, Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)),
        (1e6, "yarn", YARN, Rope(1e6, "yarn", 4.0, original_max_position=4096)),
        (
            1e6,
            "yarn",
            {**YARN, "attention_factor": 0.75, "beta_fast": 16.0, "beta_slow": 2.0},
            Rope(1e6, "yarn", 4.0, original_max_position=4096, attention_factor=0.75, beta_fast=16.0, beta_slow=2.0),
        ),
        *(
            (
                1e6,
                "longrope",
                {**LONGROPE, "original_max_position_embeddings": original},
                Rope(
                    1e6,
                    "longrope",
                    original_max_position=original,
                    attention_factor=1.25,
                    divisors=tuple(LONG),
                    short_divisors=tuple(SHORT),
                ),
            )
            for original in (299, 300)
        ),
    ],
)
def test_angles_are_those_of_transformers(theta: float, kind: str, options: dict[str, Any], rope: Rope) -> None:
    wanted = reference(theta, kind, options, 300)
    made = rope.tables(HEAD_DIM, 300, torch.device("cpu"))
    for ours, theirs in zip(made, wanted, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("served", [90, 100, 101, 300, 400])
def test_dynamic_angles_are_those_of_transformers_at_the_served_length(served: int) -> None:
    wanted = reference(1e4, "dynamic", {"factor": 4.0}, served, max_position=100)
    made = Rope(1e4, "dynamic", 4.0, original_max_position=100).tables(HEAD_DIM, served, torch.device("cpu"))
    for ours, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_every_type_is_compared_with_transformers() -> None:
    (cases,) = [mark.args[1] for mark in test_angles_are_those_of_transformers.pytestmark]  # type: ignore[attr-defined]
    assert {case[1] for case in cases} | {"dynamic"} == set(ROPE_TYPES)


def test_divisors_replace_the_kind() -> None:
    divisors = tuple(1.0 + i for i in range(HEAD_DIM // 2))
    plain = Rope(10000.0).frequencies(HEAD_DIM, 64)
    assert torch.equal(
        Rope(10000.0, "llama3", 8.0, divisors=divisors).frequencies(HEAD_DIM, 64), plain / torch.tensor(divisors)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 0.0}, r"theta of rotary embedding must be from 1e-18 to 1e\+18, not 0"),
        ({"theta": float("nan")}, "theta .* not nan"),
        ({"theta": 1e4, "rope_type": "linear", "factor": 1e30}, r"factor .* not 1e\+30"),
        ({"theta": 1e4, "divisors": (1.0, 0.0)}, "a divisor .* not 0"),
        ({"theta": 1e4, "divisors": (1.0,), "short_divisors": (0.0,)}, "a divisor .* not 0"),
        ({"theta": 1.0, "rope_type": "yarn"}, "theta .* must not be 1"),
    ],
)
def test_angles_are_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rope(**options)
