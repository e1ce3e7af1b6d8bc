"""Prompt attention on a real GPU, against attention in float64. Run with ``pytest -m gpu``."""

from __future__ import annotations

import itertools

import prompt_attention_targets as targets
import pytest
import torch

from shotcast.device.triton.intrinsics import is_hopper, num_sms
from shotcast.kernels.triton.prompt_attention import tile_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_any_step_is_attended_to() -> None:
    targets.any_step_is_attended_to(15, "cuda")


@pytest.mark.parametrize("dtype", list(targets.CLOSE))
@pytest.mark.parametrize("window", [0, 500])
@pytest.mark.parametrize(
    ("kv_head_of", "head_dim"), [((0, 0, 0, 0, 1, 1, 1, 1), 128), ((0, 1, 1, 1, 2), 64), ((0,) * 12, 80), ((0, 0), 256)]
)
def test_long_steps(kv_head_of: tuple[int, ...], head_dim: int, window: int, dtype: torch.dtype) -> None:
    """Use the tiles that the engine makes; large steps and small ones have different ones."""
    device = torch.device("cuda", 0)
    group = max(len(list(heads)) for _, heads in itertools.groupby(kv_head_of))
    for sequences in (((0, 1500), (900, 548)), ((3000, 1), (1, 1), (2000, 60), (0, 66)), ((0, 3000),)):
        tokens = sum(new for _, new in sequences)
        most = tile_tokens(tokens, group, max(kv_head_of) + 1, head_dim, dtype, num_sms(device), is_hopper(device))
        case = targets.Case(sequences, kv_head_of, head_dim, 16, window, dtype, 10, 3, most, 5)
        assert targets.is_right(case, "cuda"), sequences
