"""Ranks of test_parallel.py."""

from __future__ import annotations

import torch

import shotcast
from shotcast.layers.parallel import Parallel
from shotcast.layers.quantized import Float8Rows


def norms(algorithm: str) -> tuple[bool, float]:
    """Return whether the norm came in FP8; and its difference to the other form, relative to FP8 rounding."""
    with shotcast.Communicator(device="cpu") as comm:
        parallel = Parallel(comm, algorithm=algorithm)
        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(8, 64, generator=generator).bfloat16()
        generator.manual_seed(100)
        residual = torch.randn(8, 64, generator=generator).bfloat16()
        weight = torch.rand(64, generator=generator).bfloat16()
        wanted, wanted_residual = parallel.reduce_norm(x.clone(), residual.clone(), weight, 1e-5)
        found, found_residual = parallel.reduce_norm_float8(x, residual, weight, 1e-5)
        assert torch.equal(found_residual, wanted_residual)
        if isinstance(found, torch.Tensor):
            return False, float((found - wanted).abs().max())
        assert isinstance(found, Float8Rows)
        allowed = (wanted.abs() / 16).maximum(found.scale * 2**-10) * (1 + 2**-7)
        off = (found.values.float() * found.scale - wanted.float()).abs()
        return True, float((off / allowed).max())


def norms_after_copy_engines() -> list[bool]:
    """Return whether sums of copy engines, and their norms, have the bits of the fused operation."""
    equal = []
    with shotcast.Communicator(device="cpu") as comm:
        parallel = Parallel(comm)
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(comm.rank)
            x = torch.randn(9, 64, generator=generator).to(dtype)
            generator.manual_seed(100)
            residual = torch.randn(9, 64, generator=generator).to(dtype)
            operands = torch.rand(64, generator=generator).to(dtype), 1e-5
            wanted = parallel.reduce_norm(x.clone(), residual.clone(), *operands)
            found = parallel.reduce_norm(x.clone(), residual.clone(), *operands, copy_engines=True)
            equal += [torch.equal(*pair) for pair in zip(found, wanted, strict=True)]
        (values, scale), new = parallel.reduce_norm_float8(x.clone(), residual.clone(), *operands)
        (own, own_scale), own_new = parallel.reduce_norm_float8(
            x.clone(), residual.clone(), *operands, copy_engines=True
        )
        equal += [torch.equal(own.view(torch.uint8), values.view(torch.uint8)), torch.equal(own_scale, scale)]
        return [*equal, torch.equal(own_new, new)]
