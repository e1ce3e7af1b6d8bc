"""Random weights: the same whichever part is read, and as large as real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shotcast.errors import ConfigError
from shotcast.layers.rope import Rope
from shotcast.models.config import ModelConfig
from shotcast.models.presets import preset
from shotcast.models.random_weights import RandomWeights

TINY = ModelConfig(
    hidden=64,
    intermediate=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=128,
    norm_eps=1e-6,
    rope=Rope(1e4),
    max_position=128,
    tied=False,
    attention_bias=True,
    qk_norm="head",
    dtype="float32",
)
WEIGHTS = RandomWeights(TINY)


@pytest.mark.full
@given(data=st.data())
def test_any_part_is_that_part(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WEIGHTS.shapes)))
    whole = RandomWeights(TINY).read(name)
    assert tuple(whole.shape) == WEIGHTS.shapes[name]

    def part(size: int) -> slice:
        first = data.draw(st.integers(0, size))
        return slice(first, data.draw(st.integers(first, size)))

    rows = part(whole.shape[0])
    columns = part(whole.shape[1]) if whole.dim() > 1 else None
    expected = whole[rows] if columns is None else whole[rows, columns]
    found = WEIGHTS.read(name, rows, columns)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes
    found += 1
    assert torch.equal(WEIGHTS.read(name), whole)


def test_values_are_of_the_size_of_real_ones() -> None:
    WEIGHTS.verify()
    matrix = WEIGHTS.read("lm_head.weight")
    assert matrix.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(matrix.mean().item()) < 0.001
    for norm in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        assert WEIGHTS.read(norm).mean().item() == pytest.approx(1, abs=0.02)
    assert WEIGHTS.read("model.layers.0.self_attn.q_proj.bias").abs().max() < 0.1
    assert RandomWeights(replace(TINY, dtype="bfloat16")).read("lm_head.weight").dtype == torch.bfloat16


def test_rows_tensors_and_seeds_differ() -> None:
    matrix = WEIGHTS.read("lm_head.weight")
    assert len(matrix.unique(dim=0)) == len(matrix)
    same_shape = WEIGHTS.read("model.embed_tokens.weight")
    assert not torch.equal(matrix, same_shape)
    assert not torch.equal(matrix, RandomWeights(TINY, seed=1).read("lm_head.weight"))


def test_a_part_of_the_largest_model_takes_that_part() -> None:
    """Read a part; the whole matrix would take 1.7 GB."""
    weights = RandomWeights(preset("llama-3.1-405b"))
    part = weights.read("model.layers.125.mlp.down_proj.weight", slice(0, 512), slice(53248 - 64, 53248))
    assert part.shape == (512, 64)
    assert part.float().std().item() == pytest.approx(0.02, rel=0.05)


def test_a_missing_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor 'lm_head'"):
        WEIGHTS.read("lm_head")


@pytest.mark.gpu
def test_a_gpu_makes_the_same() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    there = RandomWeights(TINY, device="cuda").read(name, slice(5, 50), slice(3, 60))
    assert there.device.type == "cuda"
    assert torch.equal(there.cpu(), WEIGHTS.read(name, slice(5, 50), slice(3, 60)))
