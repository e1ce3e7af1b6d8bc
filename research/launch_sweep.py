"""Launches of small sums beside each other: us of a call in a graph of ten, replay by replay.

    python research/launch_sweep.py --world-size 2 --json FILE

Fused all-reduce, residual and RMSNorm of rows of 8192 by every launch of one-shot and two-shot, and the plain
all-reduce from 256 KiB to 1 MiB. All take turns in five rounds, and a row has the median of its rounds. Results are
compared with each other before anything is timed. ``peer_turns.py`` times the calls of others.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_times import seconds_each
from gpu_timing import write
from rich.console import Console
from rich.table import Table

import shotcast
from shotcast import wire
from shotcast.bench import kernels
from shotcast.collectives.choice.candidates import launch_shapes
from shotcast.collectives.norm_operands import norm_operands
from shotcast.errors import ConfigError
from shotcast.units import format_size
from shotcast.wire import Op

HIDDEN = 8192
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512)
SIZES = (256 << 10, 384 << 10, 512 << 10, 768 << 10, 1 << 20)
CALLS, ROUNDS = 10, 5
EPS = 1e-6


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")], default=list(TOKENS))
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


Timed = tuple[str, dict[str, int] | None, Callable[[], Any]]
"""The name of what makes a call, its launch, and the call."""


def launches(comm: shotcast.Communicator, op: Op, x: torch.Tensor, norm: wire.Norm | None) -> list[tuple[str, Any]]:
    """Return the algorithms of one node that keep the bits, each with its launches, the default first."""
    problem = comm._resolver.problem(op, x.dtype, x.numel(), "sum", 0, (), norm)
    return [(name, shape) for name in ("one_shot", "two_shot") for shape in launch_shapes(problem, name)]


def timed_rounds(comm: shotcast.Communicator, calls: list[Timed], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Time calls in turn; as one rank. A call that is refused has its reason in place of a time."""
    times: dict[int, list[float] | str] = {number: [] for number in range(len(calls))}
    for _ in range(ROUNDS):
        for number, (_, _, call) in enumerate(calls):
            found = times[number]
            if isinstance(found, str):
                continue
            reason, mine = "", 0.0
            try:
                call()
                torch.cuda.synchronize()
                comm.check()
                mine = seconds_each(lambda turn, call=call: call(), 1, CALLS) * 1e6  # type: ignore[misc]
                comm.check()
            except (ConfigError, RuntimeError) as error:
                reason = f"{type(error).__name__}: {error}"[:160]
            told = comm._host.all_gather((mine, reason))
            if why := next((text for _, text in told if text), ""):
                times[number] = why
            else:
                found.append(max(us for us, _ in told))
    rows = []
    for number, (name, launch, _) in enumerate(calls):
        found = times[number]
        us = found if isinstance(found, str) else statistics.median(found)
        rows.append(facts | {"by": name, "launch": launch, "us": us})
    return rows


def fused_rows(comm: shotcast.Communicator, tokens: int) -> list[dict[str, Any]]:
    """Measure the fused call on ``tokens`` rows; as one rank."""
    seeds = [torch.Generator(comm.device).manual_seed(seed) for seed in (comm.rank, 99)]
    x, residual = (torch.randn(tokens, HIDDEN, generator=seed, device=comm.device).bfloat16() for seed in seeds)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=comm.device)
    op = Op.ALL_REDUCE_RMS_NORM
    wanted = comm.all_reduce_rms_norm(x, residual, weight, EPS, "one_shot")
    calls: list[Timed] = []
    kept = []
    for name, shape in launches(comm, op, x, wire.Norm(HIDDEN)):
        norm, tensors = norm_operands(op.label, x.device, x, residual, weight, EPS, 1, False, None)
        run = functools.partial(comm._run, op, x, None, algorithm=name, norm=norm, tensors=tensors, launch=shape)
        run()
        comm.check()
        torch.cuda.synchronize()
        assert torch.equal(tensors.new_residual, wanted[1]), (name, shape)
        assert tensors.normed is not None
        assert torch.equal(tensors.normed, wanted[0]), (name, shape)
        kept.append(tensors)
        calls.append((name, dataclasses.asdict(shape), run))
    return timed_rounds(comm, calls, {"op": op.label, "tokens": tokens, "bytes": x.nbytes})


def plain_rows(comm: shotcast.Communicator, size: int) -> list[dict[str, Any]]:
    """Measure the all-reduce of ``size`` bytes; as one rank."""
    seed = torch.Generator(comm.device).manual_seed(comm.rank)
    x = torch.randn(size // (2 * HIDDEN), HIDDEN, generator=seed, device=comm.device).bfloat16()
    out, wanted = torch.empty_like(x), comm.all_reduce(x, algorithm="one_shot")
    calls: list[Timed] = []
    for name, shape in launches(comm, Op.ALL_REDUCE, x, None):
        run = functools.partial(comm._run, Op.ALL_REDUCE, x, out, algorithm=name, launch=shape)
        run()
        torch.cuda.synchronize()
        comm.check()
        assert torch.equal(out, wanted), (name, shape)
        calls.append((name, dataclasses.asdict(shape), run))
    return timed_rounds(comm, calls, {"op": "all_reduce", "tokens": 0, "bytes": size})


def rows(tokens: list[int]) -> list[dict[str, Any]]:
    """Measure all of it; as one rank."""
    comm = shotcast.Communicator(device="cuda", timeout_s=30, exclusive=True)
    found = [row for count in tokens for row in fused_rows(comm, count)]
    found += [row for size in SIZES for row in plain_rows(comm, size)]
    comm.close()
    return found


def main() -> None:
    asked = options().parse_args()
    found = shotcast.spawn(rows, asked.world_size, asked.tokens, timeout_s=570)[0]
    table = Table("op", "tokens", "bytes", "by", "programs", "words", "warps", "tiles each", "us")
    for row in found:
        shape = row["launch"] or {}
        us = f"{row['us']:.2f}" if isinstance(row["us"], float) else row["us"]
        each = str(shape["chunk_bytes"] // (4 * shape["block_words"]) or "") if shape else ""
        launch = (str(shape.get(name, "")) for name in ("programs", "block_words", "num_warps"))
        table.add_row(row["op"], str(row["tokens"] or ""), format_size(row["bytes"]), row["by"], *launch, each, us)
    Console(width=160).print(table)
    if asked.json:
        write(asked.json, found, kernels.of_collectives("cuda"), world_size=asked.world_size)


if __name__ == "__main__":
    main()
