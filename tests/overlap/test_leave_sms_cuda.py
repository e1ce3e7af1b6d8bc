"""Carve-outs of the vendor library's products on a real GPU. Run with ``pytest -m gpu``."""

from __future__ import annotations

import contextlib

import pytest
import torch

from shotcast.overlap.torch_private import leave_sms

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def test_a_carve_out_ends_with_an_exception() -> None:
    library = torch.backends.cuda.preferred_blas_library()
    with contextlib.suppress(KeyError), leave_sms(24, GPU):
        assert torch._C._get_sm_carveout_experimental() == 24
        raise KeyError
    assert torch._C._get_sm_carveout_experimental() is None
    assert torch.backends.cuda.preferred_blas_library() == library


def test_a_carved_product_in_a_graph_leaves_sms() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    a, b = (torch.randn(4096, 4096, generator=generator, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    graph = torch.cuda.CUDAGraph()
    with leave_sms(24, GPU):
        exact = a @ b
        with torch.cuda.graph(graph):
            torch.mm(a, b, out=out)
    assert torch._C._get_sm_carveout_experimental() is None
    graph.replay()
    assert torch.equal(out, exact)
