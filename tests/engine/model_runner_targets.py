"""What ranks run for test_runner.py: scheduler and runner without the processes around them."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import shotcast
from shotcast.engine.capture_sizes import decode_capture_size, decode_capture_sizes
from shotcast.engine.model_runner import AsyncModelRunnerOutput, ModelRunner, ModelRunnerOutput
from shotcast.engine.outputs import EngineCoreOutput
from shotcast.engine.prefill_graphs import PrefillGraphs
from shotcast.engine.requests import Request
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.step_plan import PENDING_TOKEN
from shotcast.layers.parallel import Parallel
from shotcast.layers.step_timer import DeviceStepTimer, HostStepTimer, StepTimer
from shotcast.layers.weights import Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.source import open_checkpoint

BLOCK = 4
LIMIT = 64
TOKENS = 24
"""Of a step."""


def answered(
    folder: str,
    requests: list[Request],
    sequences: int,
    blocks: int,
    static: tuple[int, ...],
    lookahead: int,
    stages: int = 1,
    device: str = "cpu",
) -> tuple[dict[str, list[EngineCoreOutput]], dict[str, int]]:
    """The progress of each request; and how many steps were of what kind.

    Every rank plans for itself; ranks of other stages than the last are told what it drew.

    Args:
        static: numbers of tokens for which steps with prompts are on static memory, where all others are too. Empty:
            none are.
    """
    checkpoint = open_checkpoint(folder)
    with contextlib.ExitStack() as stack:
        job = comm = stack.enter_context(shotcast.Communicator(device=device))
        if stages > 1:
            comm = stack.enter_context(job.split(job.rank // (job.world_size // stages)))
        weights = Weights(checkpoint, torch.float32, comm.device)
        timer: StepTimer = DeviceStepTimer(comm.device) if device == "cuda" else HostStepTimer()
        model = CausalLM(checkpoint.config, weights, Parallel(comm, job, stages, timer=timer), LIMIT, sequences)
        sizes = decode_capture_sizes(sequences) if static else ()
        runner = ModelRunner(model, blocks, BLOCK, sequences, LIMIT, 11, sizes, static)
        assert runner.lookahead >= lookahead
        eos = checkpoint.config.eos
        config = SchedulerConfig(sequences, TOKENS, BLOCK, blocks, LIMIT, lookahead=lookahead, pipeline=stages, eos=eos)
        with counted(ModelRunner, "_eager_batch") as eager, counted(PrefillGraphs, "_compute_head") as heads:
            runner.capture(stamped=False)
            heads.reset_mock()
            found, counts = played(runner, Scheduler(config), requests, sizes, static, job, False)
            counts |= {"eager": eager.call_count, "heads": heads.call_count}
        if device == "cuda" or stages > 1:  # all is compiled now
            again, _ = played(runner, Scheduler(config), requests, sizes, static, job, device == "cuda")
            assert again == found, "another run gives something else"
        runner.close()
    return found, counts


def counted(owner: type, name: str) -> Any:
    """Counts calls of a method, which do what they did."""
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def drawn_by(drawing: AsyncModelRunnerOutput | None, comm: shotcast.Communicator) -> ModelRunnerOutput:
    """What the last rank drew, which every rank of its stage has drawn too."""
    told = [None if drawing is None else drawing.result()]
    if comm.world_size > 1:
        dist.broadcast_object_list(told, comm.world_size - 1, device=torch.device("cpu"))
    assert told[0] is not None
    assert drawing is None or drawing.result() == told[0]
    return told[0]


def played(
    runner: ModelRunner,
    scheduler: Scheduler,
    requests: list[Request],
    sizes: tuple[int, ...],
    prompt_sizes: tuple[int, ...],
    comm: shotcast.Communicator,
    strict: bool,
) -> tuple[dict[str, list[EngineCoreOutput]], dict[str, int]]:
    """``strict``: on CUDA, that enqueuing a step waits for the device is an error.

    Counts: of steps that only decode on static memory; of these, with padding; of all, planned ahead. Of other steps:
    all, with padding, with sequences that decode, with such as wait for their token, in which nobody draws, and with
    chunks that are not their prompt's first.
    """
    kinds = "static", "padded", "pending", "prompts", "padded prompts", "mixed", "pending mixed", "silent", "later"
    counts = dict.fromkeys(kinds, 0)
    found: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    waiting, outstanding = deque(requests), deque[AsyncModelRunnerOutput | None]()
    while waiting or outstanding or scheduler.unfinished:
        for _ in range(2):
            if waiting:
                scheduler.add(waiting.popleft())
        while (plan := scheduler.schedule()) is not None:
            bucket = decode_capture_size(plan, sizes)
            counts["static"] += bucket is not None
            counts["padded"] += bucket is not None and bucket > len(plan.sequences)
            pending = any(sequence.tokens == (PENDING_TOKEN,) for sequence in plan.sequences)
            counts["pending"] += pending
            if bucket is None:
                counts["prompts"] += 1
                counts["padded prompts"] += (
                    plan.tokens <= max(prompt_sizes, default=0) and plan.tokens not in prompt_sizes
                )
                mixed = any(not sequence.is_new for sequence in plan.sequences if len(sequence.tokens) == 1)
                counts["mixed"] += mixed
                counts["pending mixed"] += pending
                counts["silent"] += not any(sequence.do_sample for sequence in plan.sequences)
                counts["later"] += any(sequence.num_computed for sequence in plan.sequences if len(sequence.tokens) > 1)
            if strict:
                torch.cuda.set_sync_debug_mode("error")
            try:
                drawing = runner.execute(plan)
            finally:
                if strict:
                    torch.cuda.set_sync_debug_mode("default")
            outstanding.append(drawing)
        drawn = drawn_by(outstanding.popleft(), comm)
        comm.check()
        for progress in scheduler.update(drawn.number, drawn.tokens, drawn.logprobs):
            found[progress.request_id].append(progress)
    counts["preemptions"] = scheduler.stats().preemptions
    return found, counts
