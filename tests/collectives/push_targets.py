"""What ranks run for test_push.py and test_cuda_push.py: products that send to the peers what they compute."""

from __future__ import annotations

import random

import torch
from workers import check, straggle

import shotcast
from shotcast.kernels import matvec
from shotcast.kernels.matvec import Stream

STREAMS = (None, Stream("fma", 4, 128, 1, ahead_bytes=0), Stream("dot", 16, 32, 1, 2, ahead_bytes=0))


def pushed_calls(device: str, calls: int, hiddens: list[int], inputs: int, dtype_name: str, some: bool) -> int:
    """Calls whose addend was pushed by all ranks (with ``some``: by some), bit for bit as without; others between.

    Returns how many of this rank were pushed.
    """
    dtype = getattr(torch, dtype_name)
    done = 0
    with shotcast.Communicator(device=device, max_bytes=1 << 20, timeout_s=60) as comm:
        shared, own = random.Random(0), random.Random(comm.rank)
        for number in range(calls):
            rows, hidden = shared.randrange(1, 6), shared.choice(hiddens)
            generator = torch.Generator().manual_seed(number * comm.world_size + comm.rank)
            x = torch.randn(rows, inputs, generator=generator).to(comm.device, dtype)
            weight = torch.randn(hidden, inputs, generator=generator).to(comm.device, dtype)
            common = torch.Generator().manual_seed(number)
            residual = torch.randn(rows, hidden, generator=common).to(comm.device, dtype)
            gain = torch.randn(hidden, generator=common).to(comm.device, dtype)
            stream = STREAMS[number % len(STREAMS)]
            wanted = comm.all_reduce_rms_norm(
                matvec.linear(x, weight, stream=stream), residual, gain, algorithm="one_shot"
            )
            straggle(comm, own)
            push = comm.push(residual, "one_shot")
            assert push is not None
            if some and own.random() < 0.5:
                push = None
            product = matvec.linear(x, weight, stream=stream, push=push)
            straggle(comm, own)
            got = comm.all_reduce_rms_norm(product, residual, gain, algorithm="one_shot", pushed=push)
            for mine, theirs, what in zip(got, wanted, ("normed", "new residual"), strict=True):
                check(mine, theirs, (number, what))
            done += push is not None
            if shared.random() < 0.3:
                comm.all_reduce(product)
        comm.check()
    return done


def where_none(device: str) -> None:
    """No push where the call would not be a one-shot, or its rows are not whole tiles."""
    with shotcast.Communicator(device=device, max_bytes=1 << 20) as comm:

        def like(rows: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(rows, hidden, dtype=dtype, device=comm.device)

        assert comm.push(like(1, 1024)) is not None
        assert comm.push(like(1, 1024), "two_shot") is None
        assert comm.push(like(1, 1024), "vendor") is None
        assert comm.push(like(1, 1000)) is None
        assert comm.push(like(1, 1024, torch.float32)) is None
        assert comm.push(like(0, 1024)) is None
        assert comm.push(like(2000, 1024)) is None, "the slots have no room for so many"


def compiled() -> object:
    with shotcast.Communicator(device="cpu") as comm:
        return comm.push(torch.zeros(1, 1024, dtype=torch.bfloat16), "one_shot")
