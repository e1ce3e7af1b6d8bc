"""A rank's memory: its limit, what weights and the largest steps take, and what is left for the cache.

On a GPU, the ranks share a fraction of its memory (``gpu_memory_utilization``). Their memory use without a cache is
measured after capturing all graphs and running the largest steps; the cache gets the rest. On a CPU, ranks may use a
fraction of the free memory (``memory_fraction``), and the cache gets a quarter of what the weights leave, since steps
and other processes need memory too.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from shotcast.engine.config import EngineConfig
from shotcast.errors import ConfigError, ShotcastError
from shotcast.models.memory_estimate import available_bytes
from shotcast.units import about_size

logger = logging.getLogger(__name__)

_CPU_CACHE_DIVISOR = 4
"""Divisor of the memory left by the weights that gives the cache size on a CPU."""
_OUT_OF_MEMORY = "out of memory", "can't allocate memory"
"""Error texts of PyTorch and drivers for lack of memory."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, which its ranks share: a GPU's, or of this machine or this process's control group."""

    device: torch.device

    @property
    def total(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1] if self.device.type == "cuda" else self.free

    @property
    def free(self) -> int:
        """The bytes not held by any process."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_bytes()


@dataclass(frozen=True, slots=True)
class KnownMemory:
    """Memory with a known number of free bytes. Memory that other processes hold on a GPU is found when ranks load."""

    total: int

    @property
    def free(self) -> int:
        return self.total


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of a rank, as found before it loads anything."""

    memory: DeviceMemory | KnownMemory  # the device's
    free: int  # the bytes of the device that were free
    sharers: int  # the number of ranks on the device
    limit: int  # the bytes that this rank may use
    limit_text: str  # how the limit came about, for errors
    weights: int  # the bytes of its weights, as estimated
    option: str  # the option that raises the limit
    measured: bool  # the cache gets what is left when steps have been run; otherwise it is estimated

    @classmethod
    def find(
        cls, config: EngineConfig, memory: DeviceMemory | KnownMemory, sharers: int, weights: int, dtype: str
    ) -> MemoryBudget:
        """Find a rank's limit. Raises ConfigError if the memory is not free, or weights or the cache do not fit.

        Args:
            sharers: the number of ranks that share the memory.
            weights: bytes of the weights of a rank.
            dtype: the dtype of the weights, for errors.
        """
        free = memory.free
        if config.device == "cuda":
            total, wanted = memory.total, int(memory.total * config.gpu_memory_utilization)
            possible = math.floor(100 * free / total) / 100
            if wanted > free:
                raise ConfigError(
                    f"the engine is to use {about_size(wanted)} of a GPU (gpu_memory_utilization "
                    f"{config.gpu_memory_utilization:g} of {about_size(total)}), but only {about_size(free)} are free. "
                    f"Lower gpu_memory_utilization to {possible:g} or less, or end what holds the rest"
                )
            limit, part = wanted // sharers, f"{config.gpu_memory_utilization:.0%} of {about_size(total)}"
        else:
            share = free // sharers
            limit = int(share * config.memory_fraction)
            part = f"{config.memory_fraction:.0%} of {about_size(share)} free"
        limit_text = f"it may use {about_size(limit)} ({part}{f', shared by {sharers} ranks' if sharers > 1 else ''})"
        needed = f"the weights of a rank take {about_size(weights)} as {dtype}"
        option = "gpu_memory_utilization" if config.device == "cuda" else "memory_fraction"
        if weights > limit:
            smaller = "" if config.quantization else f"{'another dtype' if config.device == 'cpu' else 'fp8'}, "
            raise ConfigError(f"{needed}; {limit_text}. Use more ranks, {smaller}another model or a higher {option}")
        if config.kv_cache_bytes > limit - weights:
            raise ConfigError(
                f"{needed}, and kv_cache_bytes is {about_size(config.kv_cache_bytes)}; {limit_text}. kv_cache_bytes "
                f"may be {limit - weights} at most; 0 uses what is available"
            )
        measured = config.device == "cuda" and not config.kv_cache_bytes
        return cls(memory, free, sharers, limit, limit_text, weights, option, measured)

    def measured_room(self, trial_cache: int, meet: Callable[[], object]) -> int:
        """Return the bytes left for a cache while all ranks hold the memory that their steps need.

        Args:
            trial_cache: bytes of a cache that this rank already holds.
            meet: waits for all ranks, which hold their memory until all have measured it.
        """
        meet()
        used = (self.free - self.memory.free) // self.sharers - trial_cache
        meet()
        logger.info(
            "%s; without a cache it takes %s, of which weights are %s",
            self.limit_text,
            about_size(max(used, 0)),
            about_size(self.weights),
        )
        return self.limit - used

    def estimated_room(self, kv_cache_bytes: int) -> int:
        """Return the estimated bytes for a cache, without measurements."""
        return kv_cache_bytes or (self.limit - self.weights) // _CPU_CACHE_DIVISOR

    @contextlib.contextmanager
    def explained(self, activity: str, advice: str) -> Iterator[None]:
        """Convert out-of-memory errors to ConfigError, with the free memory and advice.

        Args:
            activity: what needs the memory, after "while".
            advice: what the user may change.
        """
        try:
            yield
        except ShotcastError:
            raise
        except (RuntimeError, MemoryError) as error:  # PyTorch's OutOfMemoryError is a RuntimeError too
            text = str(error).lower()
            if not isinstance(error, MemoryError) and not any(known in text for known in _OUT_OF_MEMORY):
                raise
            raise ConfigError(
                f"out of memory while {activity}: {about_size(self.memory.free)} are free, weights take "
                f"{about_size(self.weights)}, and {self.limit_text.replace('it may', 'a rank may')}. {advice}. "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from error


def require_one_sequence(
    blocks: int, block_size: int, bytes_per_block: int, max_model_len: int, budget: MemoryBudget, room: int
) -> None:
    """Raise ConfigError unless the cache fits one sequence of ``max_model_len`` tokens.

    Args:
        blocks: blocks that every rank has room for.
        room: bytes that were left for the cache.
    """
    needed = -(-max_model_len // block_size)
    if blocks >= needed:
        return
    tokens = max(blocks, 0) * block_size
    if budget.measured:
        steps = max(budget.limit - room - budget.weights, 0)
        use = f"{budget.limit_text}, weights take {about_size(budget.weights)} and steps {about_size(steps)}"
        advice = f"lower max_model_len{f' to {tokens} or less' if tokens > 1 else ''}, max_num_batched_tokens or "
        advice += f"max_num_seqs, use more ranks or fp8, or raise {budget.option}"
    else:
        use = budget.limit_text
        advice = f"lower max_model_len or give it more memory (kv_cache_bytes, {budget.option})"
    raise ConfigError(
        f"the cache has room for {tokens} tokens ({about_size(max(room, 0))}), fewer than one sequence of "
        f"max_model_len {max_model_len} needs ({about_size(needed * bytes_per_block)}): {use}; {advice}"
    )
