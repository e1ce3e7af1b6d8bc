"""research/large_gemm.py on a real GPU, against float64. Run with ``pytest -m gpu``."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import large_gemm as gemm
import pytest
import torch
from gemm_targets import GemmCase, excess, matrix
from large_gemm import Gemm, GemmConfig

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
CONFIGS = [
    *gemm.FAST_ON_FEW,
    GemmConfig(),
    GemmConfig(256, 128, 64, 4, 8, persistent=True),
    GemmConfig(128, 128, 64, 3, 4),
    GemmConfig(64, 64, 32, 3, 4),
    GemmConfig(64, 64, 64, 3, 4, padding_bytes=100 << 10),
]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_layouts_and_ends(config: GemmConfig, dtype: torch.dtype) -> None:
    shapes = [(1024, 768, 512), (136, 264, 1000), (8, 8, 8), (1000, 8, 64)]
    for (m, n, k), a_by_columns, b_by_columns in itertools.product(shapes, (False, True), (False, True)):
        for sms in (1, 7, 132):
            case = GemmCase(m, n, k, dtype, a_by_columns, b_by_columns, config=config, sms=sms)
            assert excess(case, "cuda") <= 1, case


@pytest.mark.parametrize("margin", [0, 1, 2, 4, 8])
def test_odd_shapes_and_alignments(margin: int) -> None:
    for m, n, k in [(1, 1, 1), (33, 65, 17), (130, 258, 100), (513, 511, 514), (64, 40, 4)]:
        for a_by_columns, b_by_columns in itertools.product((False, True), repeat=2):
            case = GemmCase(m, n, k, BF16, a_by_columns, b_by_columns, margin)
            assert excess(case, "cuda") <= 1, case


def test_no_columns_to_sum_and_no_outputs() -> None:
    for m, n, k in [(5, 130, 0), (0, 8, 8), (8, 0, 8), (0, 3, 8)]:
        assert excess(GemmCase(m, n, k), "cuda") == 0


def test_bits_are_equal_on_any_number_of_sms() -> None:
    a, b = matrix(2048, 1024, False, 0, BF16, "cuda"), matrix(1024, 2304, True, 0, BF16, "cuda")
    results = []
    for sms in (1, 24, 108, 132):
        out = torch.full((2048, 2304), float("nan"), device="cuda", dtype=BF16)
        form = gemm.form_of(a, b, out)
        Gemm(form, gemm.FAST_ON_FEW[0], sms)(a, b, out)
        results.append(out)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_calls_move_to_other_tensors_and_replay_in_graphs() -> None:
    """Check that a launch takes the addresses of each call, and a graph those of its capture."""
    operands = [
        (matrix(512, 256, False, 0, BF16, "cuda") * scale, matrix(256, 384, True, 0, BF16, "cuda")) for scale in (1, 2)
    ]
    outs = [torch.zeros(512, 384, device="cuda", dtype=BF16) for _ in operands]
    bound = Gemm(gemm.form_of(*operands[0], outs[0]), GemmConfig(), 132)
    bound(*operands[0], outs[0])
    bound(*operands[1], outs[1])
    assert torch.equal(outs[0] * 2, outs[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pair, out in zip(operands, outs, strict=True):
            bound(*pair, out)
    kept = [out.clone() for out in outs]
    for number in range(3):
        for (a, _), out in zip(operands, outs, strict=True):
            a.mul_(0.5)
            out.fill_(float("nan"))
        graph.replay()
        for out, before in zip(outs, kept, strict=True):
            assert torch.equal(out, before * 0.5 ** (number + 1))


def test_threads_share_a_launch() -> None:
    """Check that each call computes its own operands, whichever thread is between its addresses and its launch."""
    pairs = [
        (matrix(256, 256, False, 0, BF16, "cuda") * 2**number, matrix(256, 256, True, 0, BF16, "cuda"))
        for number in range(4)
    ]
    exact = [a @ b for a, b in pairs]
    outs = [torch.zeros_like(out) for out in exact]
    bound = Gemm(gemm.form_of(*pairs[0], outs[0]), GemmConfig(64, 64, 64), 132)
    bound(*pairs[0], outs[0])

    def work(number: int) -> int:
        stream, wrong = torch.cuda.Stream(), torch.zeros((), device="cuda", dtype=torch.int64)
        with torch.cuda.stream(stream):
            for _ in range(2000):
                outs[number].fill_(float("nan"))
                bound(*pairs[number], outs[number])
                wrong += (outs[number] != exact[number]).any()
        stream.synchronize()
        return int(wrong)

    torch.cuda.synchronize()
    for number, (a, b) in enumerate(pairs):
        bound(a, b, outs[number])
        exact[number] = outs[number].clone()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(pairs)) as pool:
        assert list(pool.map(work, range(len(pairs)))) == [0] * len(pairs)
