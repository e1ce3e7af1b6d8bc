"""A faked device, and functions that ranks run for test_memory.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import shotcast
from shotcast.engine import load
from shotcast.engine.config import EngineConfig
from shotcast.engine.memory import MemoryBudget
from shotcast.errors import ConfigError

GIB = 1 << 30
BLOCK_BYTES = 1 << 23


class FakeMemory:
    """A device of which ``taken`` bytes more are in use than at the start."""

    def __init__(self, total: int, free: int):
        self.total, self._free, self.taken = total, free, 0
        self.calls: list[str] = []

    @property
    def free(self) -> int:
        return self._free - self.taken


class FakeRunner:
    """A model runner that takes memory when it captures."""

    def __init__(self, memory: FakeMemory, num_blocks: int, nbytes: int):
        self._memory, self._nbytes = memory, nbytes + (num_blocks + 1) * BLOCK_BYTES
        memory.calls.append(f"new {num_blocks}")

    def capture(self, stamped: bool) -> None:
        self._memory.calls.append(f"capture {stamped}")
        self._memory.taken += self._nbytes

    def close(self) -> None:
        self._memory.calls.append("close")


def allocate(blocks: int, block_size: int) -> list[SimpleNamespace]:
    keys = torch.empty(blocks, BLOCK_BYTES // 4, dtype=torch.int16, device="meta")
    return [SimpleNamespace(keys=keys, values=keys, nbytes=2 * keys.nbytes)]


def measured_blocks(sequences: int, blocks_each: int, gib_of_first: int = 1) -> tuple[int, list[str]]:
    """Return the blocks that the ranks agree on, and what happened to this rank's trial."""
    config = EngineConfig("m", device="cuda", max_num_seqs=sequences, stamp_every=1)
    memory: Any = FakeMemory(10 * GIB, 10 * GIB)
    budget = MemoryBudget.find(config, memory, 1, 0, "bfloat16")
    part: Any = SimpleNamespace(allocate_caches=allocate)
    with shotcast.Communicator(device="cpu") as world:

        def new_runner(num_blocks: int) -> Any:
            return FakeRunner(memory, num_blocks, (gib_of_first + world.rank) * GIB)

        with patch.object(load, "_release", lambda: memory.calls.append("release")):
            blocks = load._num_cache_blocks(config, [part], budget, blocks_each * config.block_size, world, new_runner)
    return blocks, memory.calls


def refusal() -> str:
    """Return why ranks refuse a cache that does not fit on the second."""
    try:
        measured_blocks(1, 16, 8)
    except ConfigError as error:
        return str(error)
    return ""
