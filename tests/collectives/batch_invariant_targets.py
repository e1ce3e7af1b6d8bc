"""Functions that the ranks of tests/collectives/test_batch_invariant.py run."""

from __future__ import annotations

import random

import expected_results
import pytest
import torch
from workers import bits, check, inputs

import shotcast
from shotcast import wire
from shotcast.collectives import reference
from shotcast.collectives.reductions import Reduction


def _tensor(count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (count,), generator=generator).to(dtype)


def parts_of_messages(
    device: str, dtypes: list[str], count: int, cuts: int, batch_invariant: bool, max_bytes: int, seed: int = 0
) -> int:
    """Sum a message whole and in parts of random places and sizes. Return the number of parts with other bits.

    The parts are what a batch of other size would have around the same elements. In the mode they are also compared
    with plain torch, by every operation that adds up.
    """
    others = 0
    options = {"device": device, "max_bytes": max_bytes, "timeout_s": 120, "batch_invariant": batch_invariant}
    with shotcast.Communicator(**options) as comm:
        rank, size, rng = comm.rank, comm.world_size, random.Random(seed)
        for name in dtypes:
            dtype = getattr(torch, name)
            xs = [_tensor(count, dtype, peer) for peer in range(size)]
            x = xs[rank].to(comm.device)
            reductions: tuple[Reduction, ...] = wire.REDUCED[name] if name not in wire.REDUCIBLE else ("sum",)
            for reduction in reductions:
                whole = comm.all_reduce(x, reduction=reduction)
                if batch_invariant:
                    check(whole.cpu(), expected_results.reduced(xs, str(reduction)), (name, reduction))
                for _ in range(cuts):
                    length = min(count, int(count ** rng.random()) + 1)
                    start = rng.randrange(count - length + 1)
                    part = comm.all_reduce(x[start : start + length].clone(), reduction=reduction)
                    others += not torch.equal(bits(part), bits(whole[start : start + length]))
                    if batch_invariant:
                        assert not comm.explain(part, reduction=reduction).by_library
        comm.check()
    return others


def other_operations(device: str) -> None:
    """Compare reduce_scatter, reduce and fused norms of parts with those of the whole."""
    with shotcast.Communicator(device=device, timeout_s=120, batch_invariant=True) as comm:
        rank, size = comm.rank, comm.world_size
        rows, hidden = 12 * size, 64
        xs = [x.view(rows, hidden) for x in inputs(rows * hidden, torch.float32, size, 3, comm.device)]
        total = reference.ordered_sum(xs)
        residual = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).to(comm.device)
        weight = torch.ones(hidden, device=comm.device)
        normed, new = comm.all_reduce_rms_norm(xs[rank], residual, weight)
        check(new, total + residual, "fused sum")
        for part in (1, size, 5):
            some, some_new = comm.all_reduce_rms_norm(xs[rank][:part].clone(), residual[:part].clone(), weight)
            check(some, normed[:part], ("normed", part))
            check(some_new, new[:part], ("residual", part))
        for k in (size, 4 * size, rows):
            scattered = comm.reduce_scatter(xs[rank][:k].clone())
            check(scattered, total[:k].chunk(size)[rank], ("reduce_scatter", k))
            at_root = comm.reduce(xs[rank][:k].clone(), 0)
            if rank == 0:
                check(at_root, total[:k], ("reduce", k))
        comm.check()


def refused() -> tuple[list[str], str, str]:
    """Return the errors of calls that the mode does not serve, an explanation, and that of a communicator split off."""
    errors = []
    with shotcast.Communicator(device="cpu", batch_invariant=True) as comm:
        x = torch.ones(64)
        for algorithm in ("ring", "vendor", "two_shot_fp8"):
            with pytest.raises(shotcast.ConfigError) as caught:
                comm.all_reduce(x, algorithm=algorithm)
            errors.append(str(caught.value))
        for call in (lambda: comm.all_reduce(x.to(torch.float8_e4m3fn)), lambda: comm.explain(x.to(torch.float8_e5m2))):
            with pytest.raises(shotcast.UnsupportedError) as unserved:
                call()
            errors.append(str(unserved.value))
        assert comm.all_gather(x.to(torch.float8_e4m3fn)).numel() == 64 * comm.world_size  # a copy, which is exact
        half = comm.split(0)
        assert half is not None
        with half, pytest.raises(shotcast.UnsupportedError):
            half.all_reduce(x.to(torch.float8_e4m3fn))
        explanations = str(comm.explain(x)), str(half.explain(x))
        comm.check()
    return errors, *explanations


def of_the_environment() -> str:
    """Return the explanation of a sum by a communicator that takes its mode from the environment."""
    with shotcast.Communicator(device="cpu") as comm:
        return str(comm.explain(torch.ones(64)))


def alone() -> None:
    """Reduce what native kernels lack on one rank, where there is no order."""
    with shotcast.Communicator(device="cpu", batch_invariant=True) as comm:
        x = torch.ones(8).to(torch.float8_e4m3fn)
        assert torch.equal(comm.all_reduce(x).float(), x.float())
