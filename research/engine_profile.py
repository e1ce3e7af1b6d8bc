"""Kernels of steps of the engine on one GPU by name: of prompts, and of sequences that decode.

    python research/engine_profile.py --model random:llama-3.1-8b [--quantization fp8] [--json FILE]

Steps are the engine's own, replayed by its model runner: 2048 tokens of prompts of 512, and sequences that decode with
576 tokens each. A step is repeated for a second before it is timed, as in an engine under load, and timed without the
profiler; torch.profiler then says which kernels it has. Kernels that overlap count twice, so their sum may exceed the
step.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_timing import write
from torch.profiler import ProfilerActivity, profile

from shotcast.bench import kernels
from shotcast.collectives.communicator import Communicator
from shotcast.engine.cuda_graphs import decode_capture_sizes
from shotcast.engine.model_runner import ModelRunner
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.step_plan import PENDING_TOKEN, ScheduledSequence, StepPlan
from shotcast.launcher.spawn import spawn
from shotcast.layers.parallel import Parallel
from shotcast.layers.step_timer import DeviceStepTimer
from shotcast.layers.weights import Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.source import open_checkpoint

BLOCK, PROMPT, STEP, CONTEXT = 16, 512, 2048, 576
LENGTH = PROMPT + 128
REPEATED_S = 1.5
TIMED, PROFILED = 40, 5


def prompts() -> StepPlan:
    """Return a step of whole prompts, which take the first slots."""
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    blocks = -(-LENGTH // BLOCK)
    parts = []
    for slot in range(STEP // PROMPT):
        tokens = tuple((slot * 7 + place) % 5000 for place in range(PROMPT))
        table = tuple(range(slot * blocks, (slot + 1) * blocks))
        parts.append(ScheduledSequence(slot, 0, tokens, table, True, True, params, str(slot)))
    return StepPlan(0, tuple(parts))


def introduced(sequences: int) -> StepPlan:
    """Return a step in which sequences begin with one token, so that their slots have blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    blocks = -(-LENGTH // BLOCK)
    tables = (tuple(range(slot * blocks, (slot + 1) * blocks)) for slot in range(sequences))
    return StepPlan(
        0,
        tuple(
            ScheduledSequence(slot, 0, (1,), table, True, True, params, str(slot)) for slot, table in enumerate(tables)
        ),
    )


def decoding(sequences: int) -> StepPlan:
    """Return a step of sequences that decode."""
    return StepPlan(
        1,
        tuple(ScheduledSequence(slot, CONTEXT - 1, (PENDING_TOKEN,), (), False, True) for slot in range(sequences)),
    )


def times_of(run: Callable[[], Any]) -> dict[str, Any]:
    """Return the milliseconds of a step, and microseconds and calls of each kernel of it."""
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    while time.perf_counter() - started < REPEATED_S:
        for _ in range(4):
            run()
        torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    step_ms = median(before.elapsed_time(after) for before, after in itertools.pairwise(events))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time)
    by_time = sorted(times.items(), key=lambda entry: -sum(entry[1]))
    listed = [{"name": name, "calls": len(each) / PROFILED, "us": sum(each) / PROFILED} for name, each in by_time]
    return {"step_ms": step_ms, "kernels": listed}


def profile_rank(name: str, quantization: str, sequences: tuple[int, ...]) -> list[dict[str, Any]]:
    """Profile the steps of a model on one GPU."""
    rows = []
    with torch.inference_mode(), Communicator(device="cuda", timeout_s=600.0, exclusive=True) as comm:
        checkpoint = open_checkpoint(name, comm.device)
        weights = Weights(checkpoint, torch.bfloat16, comm.device, quantization=quantization)
        parallel = Parallel(comm, comm, 1, timer=DeviceStepTimer(comm.device))
        most = max(max(sequences), STEP // PROMPT)
        model = CausalLM(checkpoint.config, weights, parallel, LENGTH, most)
        checkpoint.close()
        sizes = tuple(sorted({*sequences, decode_capture_sizes(most)[-1]}))
        runner = ModelRunner(model, most * -(-LENGTH // BLOCK), BLOCK, most, LENGTH, 0, sizes, (16, 128, STEP))
        runner.capture(stamped=False)
        steps = {f"{STEP} tokens of prompts of {PROMPT}": prompts()}
        steps |= {f"{count} sequences of {CONTEXT} tokens": decoding(count) for count in sequences}
        runner.execute(introduced(most))
        for step, plan in steps.items():
            rows.append({"model": name, "quantization": quantization, "step": step})
            rows[-1] |= times_of(lambda plan=plan: runner.execute(plan))  # type: ignore[misc]
        runner.close()
    return rows


def text_of(row: dict[str, Any]) -> str:
    """Return a profile as text: the kernels that take a thousandth of the step or more."""
    lines = [f"{row['model']} {row['quantization']}, {row['step']}: {row['step_ms']:.3f} ms a step".replace(" ,", ",")]
    lines.append(f"  {'us a step':>10} {'calls':>6} {'us a call':>10}  kernel")
    for kernel in row["kernels"]:
        if kernel["us"] >= row["step_ms"]:
            each = kernel["us"] / kernel["calls"]
            lines.append(f"  {kernel['us']:10.1f} {kernel['calls']:6g} {each:10.2f}  {kernel['name'][:120]}")
    lines.append(f"  {sum(kernel['us'] for kernel in row['kernels']):10.1f} of all kernels")
    return "\n".join(lines)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", default="")
    parser.add_argument("--sequences", default="64,256")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    asked = options().parse_args()
    sequences = tuple(int(number) for number in asked.sequences.split(","))
    (rows,) = spawn(profile_rank, 1, asked.model, asked.quantization, sequences)
    for row in rows:
        print(text_of(row), end="\n\n")
    if asked.json is not None:
        write(asked.json, rows, kernels.of_layout("cuda", 1))


if __name__ == "__main__":
    main()
