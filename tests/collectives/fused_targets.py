"""What ranks do in the tests of the fused operations: the same on compiled CPU ranks, the interpreter, and GPUs."""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import Any, NamedTuple

import torch
from workers import FLOATS, check, differing, inputs, settle, shifted, straggle

import shotcast
from shotcast.collectives import reference, rms_norm
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.norm_operands import Fp8Normed, norm_operands
from shotcast.wire import Op

EPS = 1e-5
QUANTIZATIONS = ("", "static", "dynamic")


class Case(NamedTuple):
    """Rows of one length, as each fused operation gets them. ``rows`` is what a rank of a reduce-scatter ends up with."""

    dtype: str
    rows: int
    hidden: int
    shift: int = 0


class Data(NamedTuple):
    """Every rank's tensors, the same on all ranks. ``residuals`` are those of the shards."""

    xs: list[torch.Tensor]
    residuals: list[torch.Tensor]
    weight: torch.Tensor
    scale: torch.Tensor


class Results(NamedTuple):
    """What a call gave; None where it was not asked for."""

    new_residual: torch.Tensor
    normed: torch.Tensor | None = None
    quantized: torch.Tensor | None = None
    scale: torch.Tensor | None = None


def data(case: Case, shards: int, world_size: int, seed: int, device: torch.device) -> Data:
    """Numbers of every magnitude that a dtype's squares allow; rows of zeros, with NaN and with infinity among them."""
    dtype = FLOATS[case.dtype]
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator) * 10 ** torch.randint(-3, 3, shape, generator=generator)
        if shape[0] > 3:
            x[1] = 0.0
            x[2, shape[1] // 2] = float("nan")
            x[3, 0] = float("inf")
        return x.to(dtype).to(device)

    xs = [made(case.rows * shards, case.hidden) for _ in range(world_size)]
    residuals = [made(case.rows, case.hidden) for _ in range(shards)]
    if case.rows > 3:
        for tensor in (*xs, *residuals):
            tensor[1 :: case.rows] = 0.0
    weight = torch.linspace(-2, 2, case.hidden).to(dtype).to(device)
    return Data(xs, residuals, weight, torch.tensor([0.031], device=device))


def close_to_exact(normed: torch.Tensor, new_residual: torch.Tensor, weight: torch.Tensor, what: Any) -> None:
    """Within what float32 inside and one rounding to the dtype can be off; NaN where float64 has it."""
    value = new_residual.double()
    wanted = value / (value.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    # float32: a mean of `hidden` squares, a root, two products
    inside = (value.shape[-1].bit_length() + 40) * torch.finfo(torch.float32).eps
    bound = (inside + torch.finfo(normed.dtype).eps / 2 * 1.01) * wanted.abs() + torch.finfo(normed.dtype).tiny
    good = ((normed.double() - wanted).abs() <= bound) | (normed.isnan() & wanted.isnan())
    assert bool(good.all()), (what, normed[~good][:4], wanted[~good][:4])


def call(
    comm: Communicator,
    op: Op,
    x: torch.Tensor,
    residual: torch.Tensor,
    made: Data,
    quantize: str,
    keeps: bool,
    algorithm: str,
    out: Any = None,
) -> Results:
    """One fused call by its public method."""
    scale = made.scale if quantize == "static" else None
    common = (x, residual, made.weight, EPS)
    gather = op is Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER
    if op is Op.ALL_REDUCE_RMS_NORM:
        if not quantize:
            normed, new_residual = comm.all_reduce_rms_norm(*common, algorithm=algorithm, out=out)
            return Results(new_residual, normed)
        got = comm.all_reduce_rms_norm_fp8(*common, scale, keeps, algorithm, out)
    elif not quantize:
        normed, new_residual = comm.reduce_scatter_rms_norm(*common, gather, algorithm, out)
        return Results(new_residual, normed)
    else:
        got = comm.reduce_scatter_rms_norm_fp8(*common, scale, keeps, gather, algorithm, out)
    assert (got.normed is not None) == keeps
    assert got.scale is scale or scale is None
    return Results(got.new_residual, got.normed, got.quantized, got.scale)


def unfused(comm: Communicator, op: Op, x: torch.Tensor, residual: torch.Tensor, made: Data) -> Results:
    """The sum by a plain call, and the norm after it."""
    plain = comm.all_reduce if op is Op.ALL_REDUCE_RMS_NORM else comm.reduce_scatter
    total = plain(x, algorithm="one_shot")
    norm, tensors = norm_operands("test", comm.device, total, residual, made.weight, EPS, 1, False, None)
    rms_norm.add_rms_norm(total, tensors, norm, comm.topology.kernels != "compiled")
    normed = tensors.normed
    if op is Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER:
        normed = comm.all_gather(normed)
    return Results(tensors.new_residual, normed)


def check_case(comm: Communicator, case: Case, op: Op, seed: int, dice: random.Random) -> int:
    """Every algorithm and every form of one operation. Returns the number of calls."""
    rank, size = comm.rank, comm.world_size
    shards = 1 if op is Op.ALL_REDUCE_RMS_NORM else size
    made = data(case, shards, size, seed, comm.device)
    made = made._replace(weight=shifted(made.weight, case.shift))
    x = shifted(made.xs[rank], case.shift)
    residual = shifted(made.residuals[rank % shards], case.shift)
    total = reference.ordered_sum(made.xs)
    wanted = reference.add_residual(total.chunk(shards)[rank % shards] if case.rows else total, residual)
    everything = reference.add_residual(total, torch.cat(made.residuals))
    plain = unfused(comm, op, x, residual, made)
    check(plain.new_residual, wanted, (case, op, "unfused"))
    gathered = op is Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER
    assert plain.normed is not None
    close_to_exact(plain.normed, everything if gathered else wanted, made.weight, (case, op, "unfused"))
    done = 1
    algorithms = [name for name in comm.candidates(x, op.label) if name != "vendor"] or ["auto"]
    for algorithm, quantize, keeps in itertools.product(algorithms, QUANTIZATIONS, (True, False)):
        if not quantize and not keeps:
            continue
        what = (case, op.label, algorithm, quantize, keeps)
        straggle(comm, dice)
        got = call(comm, op, x, residual, made, quantize, keeps, algorithm)
        check(got.new_residual, wanted, what)
        if got.normed is not None:
            check(got.normed, plain.normed, what)
        if quantize:
            given = made.scale if quantize == "static" else None
            if plain.normed.numel():
                quantized, scale = reference.quantize(plain.normed, given)
                assert got.quantized is not None
                check(got.quantized.float(), quantized.float(), what)
                check(got.scale, scale, what)
        done += 1
    return done


def cases(device: str, listed: list[Case], ops: list[Op], max_bytes: int) -> int:
    """Each case of each operation, with random stragglers. Returns the number of calls."""
    done = 0
    with shotcast.Communicator(device=device, max_bytes=max_bytes, timeout_s=60) as comm:
        dice = random.Random(comm.rank)
        for number, (case, op) in enumerate(itertools.product(listed, ops)):
            done += check_case(comm, case, op, number, dice)
        settle(comm)
    return done
