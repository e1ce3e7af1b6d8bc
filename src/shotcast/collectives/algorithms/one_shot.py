r"""One-shot: every rank sends its message to all others, and each computes the result locally.

.. math:: T = f + a + (N-1) M / b + N M / m

for N ranks, a message of M bytes, a fixed cost f of the call, a step latency a, a bandwidth b each way and a rate m at
which a rank consumes arriving data. One step, so the fastest for small messages. Copies take one step, too.
"""

from __future__ import annotations

from typing import Any

from shotcast import wire
from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, Workspace, slice_of_message, window_alone
from shotcast.collectives.fused_rows import fused_forms, tiles_of_rows
from shotcast.cost.collective import Work
from shotcast.transport.triton.layout import CHUNKS_IN_WINDOW, QUAD, window_bytes
from shotcast.units import align_up
from shotcast.wire import LaunchShape, NodeShape, Op


def all_reduce_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of sending M to N - 1 peers and adding N M, or of a root, which receives M from each rank."""
    return Work(1, (shape.world_size - 1) * nbytes, shape.world_size * nbytes).over(shape)


def part_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of a rank that sends a part of the message to each peer, or its part to all; or of a root."""
    return Work(1, (shape.world_size - 1) * nbytes / shape.world_size, nbytes).over(shape)


def broadcast_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of the root, which sends M to N - 1 peers."""
    return Work(1, (shape.world_size - 1) * nbytes, nbytes).over(shape)


def _all_reduce_workspace(problem: CollectiveProblem) -> Workspace:
    return Workspace(problem.nbytes * problem.topology.world_size, 2 * problem.topology.max_bytes)


def _fused_workspace(problem: CollectiveProblem) -> Workspace:
    tiles, block = tiles_of_rows(problem)
    return Workspace(tiles * problem.topology.world_size * block * 4, 2 * problem.topology.max_bytes)


def _gather_workspace(problem: CollectiveProblem) -> Workspace:
    max_bytes = problem.topology.max_bytes
    if not problem.sizes:
        return Workspace(problem.nbytes, max_bytes)
    slot = align_up(max(problem.sizes) * wire.DTYPES[problem.dtype], 16)
    return Workspace(slot * problem.topology.world_size, 2 * max_bytes)


def _copy(cpu: str, triton: str = "shotcast.transport.triton.copies:bind", **fields: Any) -> Form:
    """Return the form that copies a part to each peer, or to or from a root."""
    return Form(work=part_work, triton=triton, cpu=cpu, share=slice_of_message, large_warps=_four_warps, **fields)


def _message(cpu: str, hosts: str) -> Form:
    return Form(work=part_work, triton="shotcast.transport.triton.send_recv:bind", cpu=cpu, hosts=hosts)


def _four_warps(world_size: int) -> int:
    return 1 if world_size == 2 else 4


def _uneven_launch(problem: CollectiveProblem) -> LaunchShape:
    """Return the launch for parts of any sizes. It depends on no part's size, since no rank knows them all.

    The programs fill the link with half of a GPU's SMs; their chunks fill the window.
    """
    world_size, interpreted = problem.topology.world_size, problem.topology.transport.serial
    programs, block, warps = (64, 4096, 16) if world_size == 2 else (64, 2048, 16) if world_size <= 4 else (64, 1024, 8)
    if interpreted:
        programs, block, warps = 2, 64, 1
    capacity = window_bytes(problem.topology.max_bytes) // (CHUNKS_IN_WINDOW * world_size)
    programs = max(1, min(programs, capacity // QUAD))
    chunk = capacity // programs
    return LaunchShape(programs, block, warps, chunk // (4 * block) * 4 * block or chunk // QUAD * QUAD)


_SHARED_TO = 1 << 20
"""Beyond this, two-shot is faster with grids that leave room for others: on two H200s, with such a grid but no
others, 2 MiB take 12.2 us and two-shot 10.8; 8 MiB 35 and 29 (``exploration/sglang_turns_x2.txt``)."""

ALGORITHM = Algorithm(
    name="one_shot",
    label="one-shot",
    summary="every rank sends its message to all others, and each adds up alone",
    color="#1f77b4",
    forms={
        Op.ALL_REDUCE: Form(
            work=all_reduce_work,
            triton="shotcast.transport.triton.one_shot:bind",
            cpu="shotcast.transport.cpu.one_shot:ALL_REDUCE",
            any_reduction=True,
            workspace=_all_reduce_workspace,
            shared_to=_SHARED_TO,
        ),
        Op.REDUCE_SCATTER: Form(
            work=part_work,
            triton="shotcast.transport.triton.one_shot:bind",
            cpu="shotcast.transport.cpu.one_shot:REDUCE_SCATTER",
            any_reduction=True,
            share=slice_of_message,
            large_warps=_four_warps,
        ),
        Op.ALL_GATHER: _copy(
            "shotcast.transport.cpu.copies:ALL_GATHER",
            hosts="shotcast.transport.network.copies:ALL_GATHER",
            workspace=_gather_workspace,
        ),
        Op.ALL_TO_ALL: _copy("shotcast.transport.cpu.copies:ALL_TO_ALL"),
        Op.BROADCAST: Form(
            work=broadcast_work,
            triton="shotcast.transport.triton.copies:bind",
            cpu="shotcast.transport.cpu.copies:BROADCAST",
            hosts="shotcast.transport.network.copies:BROADCAST",
        ),
        Op.REDUCE: Form(
            work=all_reduce_work,
            triton="shotcast.transport.triton.one_shot:bind",
            cpu="shotcast.transport.cpu.rooted:REDUCE_AT_ROOT",
            any_reduction=True,
            workspace=_all_reduce_workspace,
        ),
        Op.GATHER: _copy("shotcast.transport.cpu.rooted:GATHER", "shotcast.transport.triton.rooted:bind"),
        Op.SCATTER: _copy("shotcast.transport.cpu.rooted:SCATTER", "shotcast.transport.triton.rooted:bind"),
        Op.ALL_TO_ALL_UNEVEN: Form(
            work=part_work,
            triton="shotcast.transport.triton.uneven:bind",
            cpu="shotcast.transport.cpu.uneven:ALL_TO_ALL",
            launch=_uneven_launch,
            workspace=window_alone,
        ),
        Op.SEND: _message("shotcast.transport.cpu.send_recv:SEND", "shotcast.transport.network.messages:SEND"),
        Op.RECV: _message("shotcast.transport.cpu.send_recv:RECV", "shotcast.transport.network.messages:RECV"),
        Op.BARRIER: Form(
            work=part_work,
            triton="shotcast.transport.triton.barrier:bind",
            cpu="shotcast.transport.cpu.copies:BARRIER",
            hosts="shotcast.transport.network.copies:BARRIER",
            share=slice_of_message,
        ),
        **fused_forms(
            all_reduce_work,
            lambda problem: 1,
            _fused_workspace,
            triton="shotcast.transport.triton.fused_one_shot:bind",
            cpu="shotcast.transport.cpu.fused:ONE_SHOT",
        ),
    },
)
