"""FP8 weights in the engine on real GPUs, beside the same model in bfloat16. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from test_llm import PROMPTS, greedy

from shotcast.engine.llm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
# three key-value heads of 64: what one and three ranks have of each matrix are multiples of 16
RANKS = [n for n in (1, 3) if n <= torch.cuda.device_count()]


@pytest.mark.parametrize("ranks", RANKS)
def test_most_first_tokens_are_those_of_bfloat16(ranks: int) -> None:
    """Prompts together are products in FP8, one by one of a few rows; neither says much else than bfloat16."""
    options = {"device": "cuda", "max_model_len": 256, "max_sequences": 32, "tensor_parallel": ranks}
    found = {}
    for quantization in ("", "fp8"):
        with LLM("smollm2", quantization=quantization, **options) as llm:
            together = llm.generate(PROMPTS, greedy(8))
            assert [output.tokens for output in together] == [
                output.tokens for output in llm.generate(PROMPTS, greedy(8))
            ], "the same batch, other tokens"
            found[quantization, "together"] = [output.tokens[0] for output in together]
            found[quantization, "alone"] = [llm.generate(prompt, greedy(1))[0].tokens[0] for prompt in PROMPTS]
    wanted = found["", "together"]
    for way in ("together", "alone"):
        same = sum(a == b for a, b in zip(found["fp8", way], wanted, strict=True))
        assert same >= 0.7 * len(PROMPTS), (way, same)
