"""What a rank has before it computes: its part of the model, the cache, and the communicators, as all ranks agree."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shotcast import env
from shotcast.collectives.communicator import MAX_WORKSPACE_MESSAGE, Communicator
from shotcast.collectives.rank_device import gpu_of, local_world_size
from shotcast.engine.config import EngineConfig
from shotcast.engine.runner import Runner
from shotcast.engine.steps import bucket_sizes, token_sizes
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.layers.parallel import Parallel
from shotcast.layers.step_timer import DeviceStepTimer, HostStepTimer
from shotcast.layers.weights import Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import available_bytes, weight_bytes
from shotcast.models.source import open_checkpoint
from shotcast.units import about_size

DEFAULT_MODEL_LEN = 8192
_CPU_SHARE = 4
"""Of the memory that weights leave of a machine, the cache takes one in so many: others work there too."""
_LOADING_S = 600.0
"""What ranks wait for each other while they load, which takes some longer than others."""
_SEQUENCE_PARALLEL_FROM = 64
"""Tokens of a step from which the residual is divided."""
_LEAST_WORKSPACE = 1 << 20
"""Of a communicator: enough for what ranks agree on, and for mailboxes, which what goes from stage to stage passes."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What an engine is once all ranks have loaded: told to whoever started it."""

    model: ModelConfig
    max_model_len: int
    kv_blocks: int
    block_size: int
    device: str
    dtype: str
    load_s: float
    capture_s: float


def load(config: EngineConfig, stack: contextlib.ExitStack) -> tuple[Runner, Ready, Communicator, Communicator]:
    """This rank's part of the model, ready to run; all ranks agree on the rest. Collective.

    Args:
        config: with ``device`` as it is on this machine.
        stack: closes what is opened here.

    Returns:
        Runner, what is told of the engine (``load_s`` is 0), and :func:`communicators`.

    Raises:
        ConfigError: the model cannot be had as the configuration says, or there is too little memory.
        UnsupportedError: the GPU does not multiply in FP8.
    """
    checkpoint = open_checkpoint(config.model, _device_of(config))
    stack.callback(checkpoint.close)
    model = checkpoint.config
    max_model_len = _model_len(config, model)
    device = config.device
    dtype_name = config.dtype or ("float32" if device == "cpu" else "bfloat16")
    dtype: torch.dtype = getattr(torch, dtype_name)
    if config.quantization:
        _require_float8(_device_of(config))
    budget = _memory_budget(config, model, dtype)
    job, comm = communicators(config, _workspace_bytes(config, model, dtype), stack)
    sequence_parallel = _SEQUENCE_PARALLEL_FROM if config.sequence_parallel else 0
    timer = DeviceStepTimer(job.device) if device == "cuda" else HostStepTimer()
    parallel = Parallel(comm, job, config.pipeline_parallel, config.algorithm, sequence_parallel, timer)
    with _progress(config.progress and job.rank == 0, budget.weights) as on_read:
        part = CausalLM(
            model,
            Weights(checkpoint, dtype, job.device, on_read, config.quantization),
            parallel,
            max_model_len,
            config.max_sequences,
        )
    blocks = _cache_blocks(config, part, budget, max_model_len, job)
    salt = torch.tensor([config.seed if config.seed is not None else secrets.randbits(62)], device=job.device)
    job.broadcast(salt, 0)
    static = bucket_sizes(config.max_sequences) if device == "cuda" else ()
    prompts = token_sizes(config.max_batch_tokens) if device == "cuda" else ()
    limits = blocks, config.block_size, config.max_sequences, max_model_len
    runner = Runner(part, *limits, int(salt), static, prompts, job.rank == config.reporter)
    stack.callback(runner.close)
    started = time.perf_counter()
    runner.capture(stamped=config.stamp_every > 0)
    capture_s = time.perf_counter() - started
    ready = Ready(model, max_model_len, blocks, config.block_size, device, dtype_name, 0.0, capture_s)
    return runner, ready, job, comm


def communicators(
    config: EngineConfig, max_bytes: int, stack: contextlib.ExitStack
) -> tuple[Communicator, Communicator]:
    """Of all ranks, stage by stage, and of this rank's stage, which is the same one if there is no other. Collective.

    Args:
        max_bytes: the longest message within a stage of several ranks. Others need next to no workspace: a rank alone
            has no peers, and what passes between stages goes through mailboxes, whatever its length.
        stack: closes both.

    Raises:
        ConfigError: the job has another number of ranks.
    """
    several = config.pipeline_parallel > 1
    of_stage = max_bytes if config.tensor_parallel > 1 else _LEAST_WORKSPACE
    job = stack.enter_context(
        Communicator(
            device=config.device,
            max_bytes=_LEAST_WORKSPACE if several else of_stage,
            timeout_s=max(config.timeout_s, _LOADING_S),
        )
    )
    if job.world_size != config.ranks:
        raise ConfigError(
            f"tensor_parallel x pipeline_parallel is {config.tensor_parallel} x {config.pipeline_parallel}, but "
            f"the job has {job.world_size} ranks"
        )
    if not several:
        return job, job
    comm = job.split(job.rank // config.tensor_parallel, max_bytes=of_stage)
    assert comm is not None
    return job, stack.enter_context(comm)


def _model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of a sequence at most. ConfigError if the model was made for fewer."""
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model was made for at most {model.max_position} tokens"
        )
    return config.max_model_len or min(model.max_position, DEFAULT_MODEL_LEN)


def _workspace_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """The longest message of a stage's collectives, or what a communicator takes at most."""
    largest = config.max_batch_tokens * model.hidden
    if config.device == "cuda":  # where longer messages would not go by own kernels: the logits of a step
        largest = max(largest, config.max_sequences * model.vocab)
    return min(max(_LEAST_WORKSPACE, largest * dtype.itemsize), MAX_WORKSPACE_MESSAGE)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes of a rank: what there is for weights and cache, and what its weights take."""

    available: int
    weights: int


def _require_float8(device: torch.device) -> None:
    found = torch.cuda.get_device_capability(device)
    if found < (8, 9):
        raise UnsupportedError(
            f"quantization fp8 multiplies in FP8, which GPUs of compute capability 8.9 and later do; "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
        )


def _device_of(config: EngineConfig) -> torch.device:
    """This rank's."""
    job = env.job()
    if config.device == "cpu" or job is None:
        return torch.device("cpu")
    return torch.device("cuda", gpu_of(job.local_rank))


def _memory_budget(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> _Memory:
    """Raises ConfigError, before anything is read, if the weights do not fit, or a cache of ``kv_cache_bytes``."""
    sharers = config.ranks if config.device == "cpu" else -(-local_world_size() // torch.cuda.device_count())
    free = available_bytes(_device_of(config)) // sharers
    available = int(free * config.memory_fraction)
    layout = config.tensor_parallel, config.pipeline_parallel
    weights = weight_bytes(model, dtype.itemsize, *layout, config.quantization)
    kind = config.quantization or str(dtype).removeprefix("torch.")
    taken = f"the weights of a rank take {about_size(weights)} as {kind}"
    has = f"it has {about_size(available)} ({config.memory_fraction:.0%} of {about_size(free)} free"
    has += f", shared by {sharers} ranks)" if sharers > 1 else ")"
    if weights > available:
        smaller = "another dtype" if config.device == "cpu" else "quantization fp8"
        raise ConfigError(
            f"{taken}; {has}. Use more ranks, {'' if config.quantization else f'{smaller} '}or another model"
        )
    if config.kv_cache_bytes > available - weights:
        raise ConfigError(
            f"{taken}, and kv_cache_bytes is {about_size(config.kv_cache_bytes)}; {has}. kv_cache_bytes may be "
            f"{available - weights} at most; 0 takes what there is"
        )
    return _Memory(available, weights)


def _cache_blocks(config: EngineConfig, part: CausalLM, budget: _Memory, max_model_len: int, job: Communicator) -> int:
    """Blocks of the paged cache that every rank has room for, at most what all sequences at full length need.

    Raises:
        ConfigError: they are too few for one sequence.
    """
    one = part.caches(1, config.block_size)
    bytes_a_block = sum(
        tensor.numel() * tensor.element_size() for cache in one for tensor in (cache.keys, cache.values)
    )
    left = budget.available - budget.weights
    room = config.kv_cache_bytes or (left if config.device == "cuda" else left // _CPU_SHARE)
    least = -(-max_model_len // config.block_size)
    blocks = min(config.max_sequences * least, room // bytes_a_block)
    blocks = int(job.all_gather(torch.tensor([blocks], device=job.device)).min())
    if blocks < least:
        raise ConfigError(
            f"the cache has room for {blocks * config.block_size} tokens ({about_size(room)}), fewer than one "
            f"sequence of max_model_len {max_model_len} needs ({about_size(least * bytes_a_block)}); lower "
            "max_model_len or give it more memory (kv_cache_bytes, memory_fraction)"
        )
    return blocks


@contextlib.contextmanager
def _progress(shown: bool, nbytes: int) -> Iterator[Callable[[int], Any]]:
    """A bar for so many bytes, on standard error."""
    if not shown:
        yield lambda read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=nbytes)
        yield lambda read: bar.advance(task, read)
