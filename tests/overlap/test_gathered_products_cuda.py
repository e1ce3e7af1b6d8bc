"""All-gather and product in one, on GPUs. Run with ``pytest -m gpu``; two ranks may share one GPU."""

from __future__ import annotations

import gathered_targets as targets
import pytest
import torch
from gathered_targets import Case

from shotcast.collectives.rank_device import enough_gpus
from shotcast.kernels.triton import gemm
from shotcast.kernels.triton.arriving_gemm import MOST_WORDS, Arrival, ArrivingGemm
from shotcast.kernels.triton.gemm import Gemm, GemmConfig
from shotcast.launcher.spawn import spawn

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
two_gpus = pytest.mark.skipif(not enough_gpus(2), reason="two GPUs")
BF16, FP16 = torch.bfloat16, torch.float16
WAYS = ["fused", "sequential", "plain", "auto"]
PERSISTENT = GemmConfig(128, 128, 64, 4, 4, persistent=True)
CASES = [
    Case(1024, 2048, (4096, 512), BF16),
    Case(1024, 2048, (4096,), BF16, None, 8, False),
    Case(200, 1000, (600,), FP16, PERSISTENT, 4),
    Case(100, 333, (200,), BF16, None, 2),
    Case(16, 64, (64,), FP16),
    Case(300, 257, (129,), torch.float32),
]


@pytest.mark.parametrize("config", [gemm.FAST, PERSISTENT], ids=str)
@pytest.mark.parametrize("rows", [1024, 1000])
def test_tiles_wait_for_rows_that_a_stream_brings(config: GemmConfig, rows: int) -> None:
    """Check the waits, and that the copy engine of an SM sees what has come: rows that have not are NaN."""
    device, depth, columns, each = torch.device("cuda", 0), 512, 2048, 64
    whole = torch.randn(2 * rows, depth, device=device).to(BF16)
    weight = torch.randn(columns, depth, device=device).to(BF16).t()
    wanted, out = (torch.full((len(whole), columns), torch.nan, device=device, dtype=BF16) for _ in range(2))
    form = gemm.form_of(whole, weight, wanted)
    Gemm(form, config, 132)(whole, weight, wanted)
    arrived = torch.full_like(whole, torch.nan)
    words = torch.zeros(MOST_WORDS + 1, dtype=torch.int64, device=device)
    workers = 4
    product = ArrivingGemm(form, config, 132, Arrival(1, 2, workers, each * depth * 2))
    product.load()
    behind, counts = torch.cuda.Stream(), torch.arange(100, device=device)

    def bring() -> None:
        with torch.cuda.stream(behind):
            for number, first in enumerate(range(0, rows, each)):
                torch.cuda._sleep(50_000)
                for start in (0, rows):
                    part = slice(start + first, start + min(first + each, rows))
                    arrived[part].copy_(whole[part])
                words[number % workers].copy_(counts[number // workers + 1])

    bring()  # kernels that are first used beside one that waits would wait for it
    for _ in range(3):
        torch.cuda.synchronize()
        for tensor in (arrived, out):
            tensor.fill_(torch.nan)
        words.zero_()
        torch.cuda.synchronize()
        product.multiply(torch.cuda.current_stream().cuda_stream, arrived, weight, out, words.data_ptr())
        bring()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
        assert not words.any()


@two_gpus
def test_every_way_has_the_bits_of_the_plain_calls() -> None:
    assert spawn(targets.wrong_products, 2, CASES, WAYS, "cuda", timeout_s=300) == [[], []]


@two_gpus
def test_graphs_replay_every_way() -> None:
    case = Case(512, 1024, (2048, 512), BF16)
    assert spawn(targets.replayed, 2, case, ["fused", "sequential", "plain"], timeout_s=300) == [[], []]


@two_gpus
def test_an_absent_rank_is_named_and_a_reset_helps() -> None:
    seen, _ = spawn(targets.absent, 2, "cuda", 3.0, timeout_s=100)
    assert seen["late"] == (1,)
    assert "all_gather_matmul" in seen["text"]
    assert seen["took"] < 20
    assert seen["again"]


@two_gpus
def test_ranks_with_other_rows_are_named() -> None:
    for text in spawn(targets.different_weights, 2, "cuda", timeout_s=100):
        assert text.startswith("CollectiveMismatch")
