"""Ranks in Triton's interpreter that put to each other as NVSHMEM does between hosts, over shared memory.

A put is done later, by a thread that stands for the network's adapter: it reads the source then, in words of 4 bytes in
any order, and no two puts are in order. The adapter of a rank may be stopped for a while.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from shotcast.memory.shm import ShmBuffer
from shotcast.memory.symmetric import ShareTarget


class Adapter:
    """Carries the puts of this rank."""

    def __init__(self, longest_s: float, seed: int):
        self.longest_s = longest_s
        self.stopped = False
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, int, int]] = []
        self._came = threading.Condition()
        self.carried = 0
        self.sizes: list[int] = []
        """Bytes of each put, in order."""
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, target: int, source: int, nbytes: int) -> None:
        assert target % 16 == source % 16 == nbytes % 16 == 0
        assert nbytes > 0
        with self._came:
            self.sizes.append(nbytes)
            self._waiting.append((time.monotonic() + self._random.random() * self.longest_s, target, source, nbytes))
            self._came.notify()

    def settle(self) -> bool:
        deadline = time.monotonic() + 60
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self._waiting

    def _run(self) -> None:
        while True:
            with self._came:
                due = [one for one in self._waiting if one[0] <= time.monotonic()]
                if self.stopped or not due:
                    self._came.wait(0.0002 if self._waiting else 1.0)
                    continue
            self._random.shuffle(due)
            for one in due:
                _, target, source, nbytes = one
                order = np.random.default_rng(self.carried).permutation(nbytes // 4)
                there, here = _words(target, nbytes), _words(source, nbytes)
                for part in np.array_split(order, 3):
                    there[part] = here[part]
                with self._came:
                    self._waiting.remove(one)
                    self.carried += 1


def _words(address: int, nbytes: int) -> Any:
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=np.int32)


ADAPTER: Adapter | None = None
_REGIONS: list[tuple[int, int, tuple[int, ...]]] = []


def emulate(longest_s: float = 0.001, seed: int = 0) -> Adapter:
    """Let kernels of this process put through a new adapter, with delays of up to ``longest_s``."""
    global ADAPTER
    from shotcast.transport.triton import network, sync

    ADAPTER = adapter = Adapter(longest_s, seed)

    def put_nbi_block(target: Any, source: Any, nbytes: Any, pe: Any) -> None:
        first, at, size, rank = (int(value.handle.data.item()) for value in (target, source, nbytes, pe))
        base, addresses = next(
            (start, addresses)
            for start, length, addresses in _REGIONS
            if start <= first and first + size <= start + length
        )
        assert base <= at < base + next(length for start, length, _ in _REGIONS if start == base)
        adapter.put(addresses[rank] + first - base, at, size)

    network.put_nbi_block = sync.put_nbi_block = put_nbi_block  # type: ignore[assignment]
    return adapter


class EmulatedLease:
    """A lease of NVSHMEM's memory. Ranks that are not ``mates`` are reached by puts alone."""

    multicast_address = 0

    def __init__(self, group: Any, nbytes: int, mates: Collection[int]):
        self._shared, self._rank = ShmBuffer(group, nbytes), group.rank
        every = self._shared.addresses
        own = every[group.rank]
        self._region = (own, self._shared.nbytes, every)
        _REGIONS.append(self._region)
        self.addresses = tuple(address if rank in mates else 0 for rank, address in enumerate(every))
        self.targets = [ShareTarget(rank, own, 0) for rank in range(group.world_size)]

    @property
    def nbytes(self) -> int:
        return self._shared.nbytes

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert rank == self._rank
        return self._shared.view(rank, offset, shape, dtype)

    def settle(self) -> bool:
        assert ADAPTER is not None
        return ADAPTER.settle()

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        if self.settle():  # other ranks have this rank's memory mapped for themselves
            if self._region in _REGIONS:  # what is mapped next may have the same addresses
                _REGIONS.remove(self._region)
            self._shared.close()
