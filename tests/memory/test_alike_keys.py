"""PyTorch's numbers of exchanges, which differ between ranks of other groups, are made alike."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from shotcast.memory.cuda import AlikeKeys


def test_exchanges_meet_whatever_their_numbers() -> None:
    """Through C++, as PyTorch's exchanges reach the store of a process group."""
    shared = dist.HashStore()
    stores = [AlikeKeys(shared) for _ in range(2)]
    ends = [dist.PrefixStore("symmetric memory", store) for store in stores]
    for exchange in range(3):
        for rank, first in enumerate((8, 6)):
            ends[rank].set(f"CUDASymmetricMemory/{first + exchange}/{rank}", f"{exchange} of {rank}")
        for rank, first in enumerate((8, 6)):
            key = f"CUDASymmetricMemory/{first + exchange}/{1 - rank}"
            ends[rank].wait([key], timedelta(seconds=1))
            assert ends[rank].get(key) == f"{exchange} of {1 - rank}".encode()
