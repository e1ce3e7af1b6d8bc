"""Loading of a rank: its communicators, its part of the model, and the paged cache, whose size all ranks agree on."""

from __future__ import annotations

import contextlib
import gc
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shotcast import env
from shotcast.collectives.communicator import MAX_WORKSPACE_MESSAGE, Communicator
from shotcast.collectives.rank_device import gpu_of, ranks_of_a_gpu
from shotcast.engine.config import EngineConfig, max_model_len_of
from shotcast.engine.cuda_graphs import decode_capture_sizes, prefill_capture_sizes
from shotcast.engine.draft_model import DraftModel
from shotcast.engine.memory import DeviceMemory, MemoryBudget, require_one_sequence
from shotcast.engine.messages import EngineInfo
from shotcast.engine.model_runner import ModelRunner
from shotcast.errors import UnsupportedError
from shotcast.layers.parallel import Parallel
from shotcast.layers.quantized import BlockRows, Float8Rows, GroupedRows
from shotcast.layers.step_timer import DeviceStepTimer, HostStepTimer
from shotcast.layers.weights import Stored, Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import weight_bytes
from shotcast.models.source import open_checkpoint
from shotcast.overlap.policy import Decision

_LOADING_TIMEOUT_S = 600.0
"""Timeout of collectives during loading, which takes some ranks longer than others."""
_MIN_WORKSPACE = 1 << 20
"""Workspace of every communicator, large enough to agree on settings and for mailboxes between stages."""


def load(
    config: EngineConfig, stack: contextlib.ExitStack
) -> tuple[ModelRunner, EngineInfo, Communicator, Communicator]:
    """Load this rank's part of the model, and agree with the other ranks on the rest. Collective. Returns the model
    runner, the properties of the engine, and the :func:`communicators`. Raises ConfigError if the model does not fit
    the configuration, or there is too little memory. Raises UnsupportedError if the GPU does not multiply in FP8.

    Args:
        stack: closes everything that is opened here.
    """
    checkpoint = open_checkpoint(config.model, _device_of(config))
    stack.callback(checkpoint.close)
    model = checkpoint.config
    max_model_len = max_model_len_of(config, model)
    device = config.device
    dtype_name = config.dtype_name
    dtype: torch.dtype = getattr(torch, dtype_name)
    if config.quantization or config.kv_cache_dtype:
        _require_float8(_device_of(config))
    budget = _memory_budget(config, model, dtype)
    world, comm = communicators(config, _workspace_bytes(config, model, dtype), stack)
    timer = DeviceStepTimer(world.device) if device == "cuda" else HostStepTimer()
    parallel = Parallel(comm, world, config.pipeline_parallel, config.algorithm, timer)
    reading = budget.explained("reading the weights", "Use more ranks, fp8 or another model")
    with reading, _progress_bar(config.progress and world.rank == 0, budget.weights) as on_read:
        part = CausalLM(
            model,
            Weights(checkpoint, dtype, world.device, on_read, config.quantization, stored_formats(config, dtype)),
            parallel,
            max_model_len,
            config.max_num_seqs,
            torch.float8_e4m3fn if config.kv_cache_dtype else None,
        )
    draft = _load_draft(config, parallel, dtype, max_model_len, budget)
    salt = torch.tensor([config.seed if config.seed is not None else secrets.randbits(62)], device=world.device)
    world.broadcast(salt, 0)
    decode_sizes = decode_capture_sizes(config.max_num_seqs) if device == "cuda" else ()
    limits_of_steps = {config.max_num_batched_tokens, config.max_step_tokens}
    prefill_sizes = prefill_capture_sizes(*sorted(limits_of_steps)) if device == "cuda" else ()

    decisions: dict[int, Decision] = {}  # a trial runner makes them

    def new_runner(num_blocks: int) -> ModelRunner:
        limits = num_blocks, config.block_size, config.max_num_seqs, max_model_len
        static = int(salt), decode_sizes, prefill_sizes
        drafting = None
        if draft is not None:
            drafting = DraftModel(ModelRunner(draft, *limits, *static), model.vocab)
        return ModelRunner(
            part,
            *limits,
            *static,
            draft=drafting,
            reports=world.rank == config.output_rank,
            overlap=config.overlap,
            max_num_batched_tokens=config.max_step_tokens,
            decisions=decisions,
            max_proposals=config.max_proposals,
        )

    started = time.perf_counter()
    blocks = _num_cache_blocks(
        config, [part, *([draft] if draft is not None else [])], budget, max_model_len, world, new_runner
    )
    allocating = f"allocating a cache of {blocks * config.block_size} tokens and capturing graphs on it"
    with budget.explained(
        allocating, "Lower gpu_memory_utilization, kv_cache_bytes, max_num_batched_tokens or max_num_seqs"
    ):
        runner = new_runner(blocks)
        stack.callback(runner.close)
        runner.capture(stamped=config.stamp_every > 0)
    capture_s = time.perf_counter() - started
    info = EngineInfo(model, max_model_len, blocks, dtype_name, capture_s)
    return runner, info, world, comm


def _load_draft(
    config: EngineConfig, parallel: Parallel, dtype: torch.dtype, max_model_len: int, budget: MemoryBudget
) -> CausalLM | None:
    """Load this rank's part of the draft model; None if there is none, or the rank is not in the last stage.

    Collective on the last stage, whose ranks share its layers.
    """
    if config.speculation is None or not config.speculation.model or not parallel.last:
        return None
    comm = parallel.comm
    ranks = Parallel(comm, algorithm=config.algorithm, timer=parallel.timer)
    with (
        contextlib.closing(open_checkpoint(config.speculation.model, comm.device)) as checkpoint,
        budget.explained("reading the weights of the draft model", "Use more ranks or another draft model"),
    ):
        formats = stored_formats(config, dtype)
        weights = Weights(checkpoint, dtype, comm.device, lambda read: None, config.quantization, formats)
        cache = torch.float8_e4m3fn if config.kv_cache_dtype else None
        return CausalLM(checkpoint.config, weights, ranks, max_model_len, config.max_num_seqs, cache)


def communicators(
    config: EngineConfig, max_bytes: int, stack: contextlib.ExitStack
) -> tuple[Communicator, Communicator]:
    """Create a communicator of all ranks, stage by stage, and one of this rank's stage. Collective.

    With a single stage, both are the same communicator.

    Args:
        max_bytes: the longest message within a stage of several ranks. Other communicators need almost no workspace: a
            single rank has no peers, and messages of any length pass between stages through mailboxes.
        stack: closes both communicators.
    """
    pipelined = config.pipeline_parallel > 1
    stage_bytes = max_bytes if config.tensor_parallel > 1 else _MIN_WORKSPACE
    world = stack.enter_context(
        Communicator(
            device=config.device,
            max_bytes=_MIN_WORKSPACE if pipelined else stage_bytes,
            timeout_s=max(config.timeout_s, _LOADING_TIMEOUT_S),
            exclusive=True,
        )
    )
    if not pipelined:
        return world, world
    comm = world.split(world.rank // config.tensor_parallel, max_bytes=stage_bytes)
    assert comm is not None
    return world, stack.enter_context(comm)


def _workspace_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the size of the longest message of a stage's collectives, up to the communicator's limit."""
    largest = config.max_step_tokens * model.hidden
    if config.device == "cuda":  # the logits of a step must fit, or the project's own kernels would not gather them
        largest = max(largest, (config.max_num_seqs + config.max_proposals) * model.vocab)
    return min(max(_MIN_WORKSPACE, largest * dtype.itemsize), MAX_WORKSPACE_MESSAGE)


def stored_formats(config: EngineConfig, dtype: torch.dtype) -> tuple[type[Stored], ...]:
    """Return the formats in which matrices stay if the checkpoint stores them that way.

    On CPUs these are the blocks of GGUF files, with float32: bfloat16 products are faster on bfloat16 values. On GPUs,
    ``quantization`` requantizes matrices in groups, and float32 dequantizes everything.
    """
    if config.device != "cuda":
        return (BlockRows,) if dtype == torch.float32 else ()
    if dtype == torch.float32:
        return ()
    groups = () if config.quantization else (GroupedRows,)
    multiplies = dtype == torch.bfloat16 and _has_float8(_device_of(config))
    return (*groups, Float8Rows) if multiplies else groups


def _has_float8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _require_float8(device: torch.device) -> None:
    if not _has_float8(device):
        capability = torch.cuda.get_device_capability(device)
        raise UnsupportedError(
            f"fp8 needs a GPU of compute capability 8.9 or later; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )


def _device_of(config: EngineConfig) -> torch.device:
    job = env.job()
    if config.device == "cpu" or job is None:
        return torch.device("cpu")
    return torch.device("cuda", gpu_of(job.local_rank))


def _memory_budget(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> MemoryBudget:
    """Return this rank's memory budget. Raises ConfigError if weights or ``kv_cache_bytes`` do not fit."""
    on_gpu = config.device == "cuda"
    sharers = ranks_of_a_gpu() if on_gpu else env.local_world_size()
    layout = config.tensor_parallel, config.pipeline_parallel
    stores = bool(stored_formats(config, dtype))

    def bytes_of(one: ModelConfig, tensor_parallel: int, pipeline_parallel: int) -> int:
        keeps = one.stored_bytes is not None and one.stored_on == config.device and stores
        kept = config.quantization or ("stored" if keeps else "")
        return weight_bytes(one, dtype.itemsize, tensor_parallel, pipeline_parallel, kept)

    weights = bytes_of(model, *layout)
    if config.speculation is not None and config.speculation.model:  # on the last stage; the fullest rank counts
        with contextlib.closing(open_checkpoint(config.speculation.model)) as checkpoint:
            weights += bytes_of(checkpoint.config, config.tensor_parallel, 1)
    dtype_name = config.quantization or str(dtype).removeprefix("torch.")
    return MemoryBudget.find(config, DeviceMemory(_device_of(config)), sharers, weights, dtype_name)


def _num_cache_blocks(
    config: EngineConfig,
    parts: list[CausalLM],
    budget: MemoryBudget,
    max_model_len: int,
    world: Communicator,
    new_runner: Callable[[int], ModelRunner],
) -> int:
    """Return how many cache blocks every rank has room for, at most enough for all sequences at full length.
    Collective. Raises ConfigError if there is too little room for one sequence, or for the largest step.
    """
    one_block = [cache for part in parts for cache in part.allocate_caches(1, config.block_size)]
    bytes_per_block = sum(cache.nbytes for cache in one_block)
    del one_block
    if budget.measured:  # beside the blocks that it is told, a runner has a spare one
        room = _measure(config, budget, 2 * bytes_per_block, world, new_runner) - bytes_per_block
    else:
        room = budget.estimated_room(config.kv_cache_bytes)
    blocks = room // bytes_per_block
    blocks = min(config.max_num_seqs * -(-max_model_len // config.block_size), blocks)
    blocks = int(world.all_gather(torch.tensor([blocks], device=world.device)).min())
    require_one_sequence(blocks, config.block_size, bytes_per_block, max_model_len, budget, room)
    return blocks


def _measure(
    config: EngineConfig,
    budget: MemoryBudget,
    trial_cache: int,
    world: Communicator,
    new_runner: Callable[[int], ModelRunner],
) -> int:
    """Run the largest steps on a one-block cache, and return the bytes left for the cache. Collective.

    Graphs of this trial refer to its cache, so they are captured again on the real one.
    """
    largest = f"running the largest step ({config.max_step_tokens} tokens, {config.max_num_seqs} sequences)"
    _release()  # what was needed only to read the weights
    with budget.explained(largest, "Lower max_num_batched_tokens or max_num_seqs, or use more ranks"):
        trial = new_runner(1)
        try:
            trial.capture(stamped=config.stamp_every > 0)
            room = budget.measured_room(
                trial_cache, lambda: int(world.all_gather(torch.zeros(1, device=world.device)).sum())
            )
        finally:
            trial.close()
    del trial
    _release()
    return room


def _release() -> None:
    """Free the memory that nothing uses any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _progress_bar(shown: bool, nbytes: int) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar of ``nbytes`` bytes on standard error; yields the function that advances it."""
    if not shown:
        yield lambda read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=nbytes)
        yield lambda read: bar.advance(task, read)
