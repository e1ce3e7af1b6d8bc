"""Functions that the ranks of the tests of fused operations run, for compiled CPU ranks only."""

from __future__ import annotations

import time

import pytest
import torch
from workers import bits, check

import shotcast
from shotcast.collectives.norm_operands import Fp8Normed
from shotcast.errors import CollectiveTimeout


def one_call_and_in_place() -> None:
    """Check that each fused operation is one call of the executor, and that outputs may overwrite the inputs."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        assert comm.candidates(torch.ones(4, 7), "all_reduce_rms_norm") == ["one_shot", "two_shot", "vendor"]
        executor = comm._executor
        assert executor is not None
        x, residual, weight = torch.full((4, 70), comm.rank + 1.0), torch.arange(280.0).view(4, 70), torch.ones(70)
        normed, new_residual = comm.all_reduce_rms_norm(x, residual, weight)
        epoch = executor.epoch
        again = comm.all_reduce_rms_norm(x, residual, weight, out=(x, residual))
        assert executor.epoch == epoch + 1
        assert again[0] is x
        assert again[1] is residual
        assert torch.equal(bits(x), bits(normed))
        assert torch.equal(bits(residual), bits(new_residual))
        x, residual = torch.full((4, 70), comm.rank + 1.0), torch.arange(280.0).view(4, 70)
        out = Fp8Normed(torch.empty(4, 70, dtype=torch.float8_e4m3fn), torch.empty(4, 1), residual, x)
        epoch = executor.epoch
        got = comm.all_reduce_rms_norm_fp8(x, residual, weight, with_normed=True, out=out)
        assert executor.epoch == epoch + 1
        assert got.normed is x
        assert torch.equal(bits(x), bits(normed))
        assert torch.equal(bits(residual), bits(new_residual))


def rows_without_elements() -> str:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        x, weight = torch.ones(3, 0), torch.ones(0)
        normed, new_residual = comm.all_reduce_rms_norm(x, x.clone(), weight)
        assert normed.shape == new_residual.shape == (3, 0)
        return str(comm.explain(x, "all_reduce_rms_norm"))


def by_the_vendor_library() -> None:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        generator = torch.Generator().manual_seed(5)
        # With two ranks there is one addition, so any order gives the same sum.
        xs = torch.randn(2, 6, 321, generator=generator)
        residual, weight = torch.randn(6, 321, generator=generator), torch.randn(321, generator=generator)
        fused = comm.all_reduce_rms_norm_fp8(xs[comm.rank], residual, weight, with_normed=True)
        plain = comm.all_reduce_rms_norm_fp8(xs[comm.rank], residual, weight, with_normed=True, algorithm="vendor")
        check(plain.new_residual, fused.new_residual, "new_residual")
        assert fused.normed is not None
        assert plain.normed is not None
        check(plain.normed, fused.normed, "normed")
        check(plain.quantized.float(), fused.quantized.float(), "quantized")
        check(plain.scale, fused.scale, "scale")


def late_rank() -> None:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        x, weight = torch.ones(4, 48, dtype=torch.bfloat16), torch.ones(48, dtype=torch.bfloat16)
        residual = torch.ones(4, 48, dtype=torch.bfloat16)
        comm.all_reduce_rms_norm_fp8(x, residual, weight)
        comm.set_timeout(0.4)
        out = Fp8Normed(torch.zeros(4, 48).to(torch.float8_e4m3fn), torch.zeros(4, 1), torch.zeros_like(residual), None)
        if comm.rank == 1:
            time.sleep(1.0)
        with pytest.raises(CollectiveTimeout, match="all_reduce_rms_norm") as caught:
            comm.all_reduce_rms_norm_fp8(x, residual, weight, out=out)
        assert list(caught.value.missing) == [1]
        if comm.rank == 0:
            assert out.new_residual.isnan().all()
            assert out.scale.isnan().all()
            assert (out.quantized.view(torch.uint8) == 0x7F).all()
        comm.set_timeout(20)
        comm.reset()
        again = comm.all_reduce_rms_norm_fp8(x, residual, weight)
        assert again.new_residual.tolist() == [[3.0] * 48] * 4
