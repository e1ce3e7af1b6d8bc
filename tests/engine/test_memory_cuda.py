"""The memory of real GPUs: what an engine takes, and what it refuses. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch

from shotcast.engine.llm import LLM
from shotcast.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from shotcast.errors import ConfigError
from shotcast.models.memory_estimate import kv_bytes_per_token

GIB = 1 << 30
CONTEXT = 1 << 30
"""The context of the process of a rank, which is no part of what it may use."""
MODEL = "random:llama-3.1-8b"


@pytest.fixture(autouse=True)
def large_gpu() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if total < 70 * GIB or free < 0.95 * total:
        pytest.skip("needs a GPU of 70 GiB that nobody uses")


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]


@pytest.mark.parametrize("utilization", [0.5, 0.9])
def test_an_engine_takes_what_it_may_and_no_more(utilization: float) -> None:
    """Fill all slots with everything that sampling offers, on a cache that memory limits."""
    free, total = torch.cuda.mem_get_info()
    options = {"max_model_len": 131072, "max_num_seqs": 128, "max_num_batched_tokens": 8192}
    with LLM(MODEL, device="cuda", gpu_memory_utilization=utilization, stamp_every=2, **options) as llm:
        taken = free - torch.cuda.mem_get_info()[0]
        assert taken <= utilization * total + CONTEXT
        cache = llm._info.kv_blocks
        assert cache * llm.config.block_size < 128 * 131072, "all sequences fit: nothing limits the cache"
        sampling = SamplingParams(
            temperature=0.9, top_k=50, top_p=0.9, presence_penalty=0.5, logprobs=MAX_LOGPROBS, max_tokens=8, seed=1
        )
        outputs = llm.generate([[1 + number] * 700 for number in range(128)], sampling)
        assert all(len(output.tokens) == 8 or output.finish_reason == "stop" for output in outputs)
        taken = free - torch.cuda.mem_get_info()[0]
        assert taken <= utilization * total + CONTEXT, "serving takes more than loading"
        unused = utilization * total - (taken - CONTEXT)
        assert unused < 0.05 * total, "the cache leaves much of the memory unused"
        kept = cache * llm.config.block_size * kv_bytes_per_token(llm.model, 2, 8, 32)
        assert kept > utilization * total - 30 * GIB


def test_what_cannot_be_is_said_before_serving() -> None:
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(ConfigError, match=r"the weights of a rank take .* a higher gpu_memory_utilization"):
        LLM(MODEL, device="cuda", gpu_memory_utilization=10 * GIB / total)
    with pytest.raises(ConfigError, match=r"fewer than one sequence of max_model_len 131072 needs .* and steps"):
        LLM(MODEL, device="cuda", gpu_memory_utilization=22 * GIB / total, max_model_len=131072)
    held = torch.empty(int(0.3 * total), dtype=torch.uint8, device="cuda")
    with pytest.raises(ConfigError, match=r"only .* are free\. Lower gpu_memory_utilization to 0\.6"):
        LLM(MODEL, device="cuda")
    del held
    torch.cuda.empty_cache()


def test_a_step_that_does_not_fit_is_said_before_serving() -> None:
    total = torch.cuda.mem_get_info()[1]
    held = torch.empty(total - 24 * GIB, dtype=torch.uint8, device="cuda")
    options = {"max_num_batched_tokens": 1 << 18, "max_model_len": 1024}
    with pytest.raises(ConfigError, match=r"out of memory while running the largest step|fewer than one sequence"):
        LLM(MODEL, device="cuda", gpu_memory_utilization=20 * GIB / total, **options)
    del held
    torch.cuda.empty_cache()
