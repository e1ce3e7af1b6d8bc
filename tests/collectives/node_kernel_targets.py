"""Functions that the ranks of tests/collectives/test_node_kernels.py run: all-reduce over nodes, without a choice.

Ranks have an executor of their own, with as many nodes as the test says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Iterator
from typing import Any

import expected_results
import torch
from workers import FLOATS, check, inputs, shifted

import shotcast
from executor_calls import run_call
from shotcast import env
from shotcast.collectives import reference
from shotcast.collectives.algorithm import Algorithm, Algorithms, Form
from shotcast.cost.collective import Work
from shotcast.hardware.nodes import NodeLayout
from shotcast.memory.arena import arena_of
from shotcast.transport.transport import Ranks
from shotcast.wire import CallPlan, LaunchShape, Op

KINDS = ("nvrar", "nvrar_pairs", "nvrar_halving")
ROUNDED = ("nvrar_16bit", "in_two_steps")
"""Sums of nodes in 16 bits, the second in two steps whatever the size; of float16 and bfloat16."""


def bind_in_two_steps(plan: CallPlan, context: Any) -> Any:
    from shotcast.transport.triton.exchanges import TWO_SHOT_16BIT
    from shotcast.transport.triton.nvrar import nodes_arguments, nvrar_all_reduce

    return context.launch(nvrar_all_reduce, plan, EXCHANGE=TWO_SHOT_16BIT.value, **nodes_arguments(plan, context))


def _member(name: str) -> Algorithm:
    bind = name.replace("nvrar_", "bind_").replace("nvrar", "bind")
    form = Form(
        work=lambda nbytes, world_size, itemsize: Work(1, nbytes, nbytes),
        triton=bind_in_two_steps if name == "in_two_steps" else f"shotcast.transport.triton.nvrar:{bind}",
        divides=True,
        between_nodes=True,
    )
    return Algorithm(name=name, label=name, summary=name, forms={Op.ALL_REDUCE: form})


ALGORITHMS = Algorithms(tuple(map(_member, (*KINDS, *ROUNDED))))


def tree_sum(xs: list[torch.Tensor], nodes: int, kind: str = "") -> torch.Tensor:
    """Return the sum of a kind in the documented order over so many nodes of consecutive ranks."""
    function = expected_results.rounded_nodes_sum if kind in ROUNDED else reference.tree_sum
    return function(xs, layout_of(nodes, len(xs)))


def layout_of(nodes: int, world_size: int) -> NodeLayout:
    """Return nodes of consecutive ranks, equally many on each."""
    local = world_size // nodes
    return NodeLayout.of_keys([f"n{rank // local}" for rank in range(world_size)])


@contextlib.contextmanager
def executor_of(comm: shotcast.Communicator, nodes: int, max_bytes: int, timeout_s: float = 60.0) -> Iterator[Any]:
    """Make an executor for the ranks of ``comm`` on so many logical nodes."""
    from shotcast.memory.shm import ShmBuffer
    from shotcast.transport.triton.executor import TritonExecutor

    host, device = comm._host, comm.device
    if device.type == "cpu":
        allocate: Any = ShmBuffer
    else:
        from shotcast.memory.cuda import CudaBuffer

        allocate = functools.partial(CudaBuffer, device=device, shared=env.share_gpus())
    arena = arena_of(device)
    ranks = Ranks(host, comm.topology.layout, True, device, max_bytes, timeout_s, ALGORITHMS)
    executor = TritonExecutor(ranks, lambda nbytes: arena.lease(host, nbytes, allocate, False), nodes)
    try:
        if max_bytes > executor.capacity:
            executor.grow(max_bytes)
        yield executor
        executor.drain()
        host.barrier()
    finally:
        executor.close()


def plan_of(kind: str, x: torch.Tensor, programs: int = 2, block: int = 16, warps: int = 1) -> CallPlan:
    launch = LaunchShape(programs=programs, block_words=block, num_warps=warps)
    dtype = str(x.dtype).removeprefix("torch.")
    return CallPlan(Op.ALL_REDUCE, kind, dtype, x.numel() * x.element_size(), launch=launch)


def values(nodes: int, cases: list[tuple[str, str, int, int, int]], clear_from: int | None = None) -> int:
    """Sum tensors of (kind, dtype, count, shift, programs), in place too, with stragglers. Return the calls made."""
    done = 0
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        rng = random.Random(comm.rank)
        with executor_of(comm, nodes, 1 << 16) as executor:
            if clear_from is not None:
                for workspace in executor.workspaces:
                    workspace.context = dataclasses.replace(workspace.context, clear_after_read_bytes=clear_from)
            for number, (kind, name, count, shift, programs) in enumerate(cases):
                xs = inputs(count, FLOATS[name], comm.world_size, number, "cpu")
                if rng.random() < 0.2:
                    time.sleep(rng.random() * 0.005)
                x = shifted(xs[comm.rank], shift)
                out = x if number % 3 == 2 else shifted(torch.zeros_like(x), shift)
                run_call(executor, plan_of(kind, x, programs), x, out)
                assert executor.fault() is None
                check(out, tree_sum(xs, nodes, kind), (nodes, kind, name, count, shift, programs))
                same = comm._host.all_gather(bytes(out.contiguous().view(torch.uint8).numpy()))
                assert len(set(same)) == 1, (kind, name, count, "ranks have different bits")
                done += 1
    return done


def changing_sizes(nodes: int, calls: int) -> None:
    """Make calls of drawn sizes, kinds and dtypes, with stragglers."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        shared, own = random.Random(7), random.Random(comm.rank)
        pools = {name: inputs(3000, dtype, comm.world_size, 3, "cpu") for name, dtype in FLOATS.items()}
        with executor_of(comm, nodes, 1 << 16) as executor:
            for number in range(calls):
                name, kind = shared.choice(list(FLOATS)), shared.choice((*KINDS, *ROUNDED))
                if kind in ROUNDED and name == "float32":
                    name = "bfloat16"
                count = int(3000 ** shared.random())
                xs = [x[:count] for x in pools[name]]
                if own.random() < 0.2:
                    time.sleep(own.random() * 0.003)
                out = torch.zeros_like(xs[0])
                run_call(executor, plan_of(kind, xs[0], shared.randrange(1, 4)), xs[comm.rank], out)
                check(out, tree_sum(xs, nodes, kind), (number, kind, name, count))


def wrapping_epochs(nodes: int) -> int:
    """Make calls on both sides of epochs 2^16, 2^31 and 2^32. Return the last epoch."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        xs = inputs(200, torch.bfloat16, comm.world_size, 5, "cpu")
        with executor_of(comm, nodes, 1 << 16) as executor:
            for border in (1 << 16, 1 << 31, 1 << 32):
                executor.drain()
                comm._host.barrier()
                executor.set_epoch(border - 3)
                comm._host.barrier()
                for kind in (*KINDS, *ROUNDED, *KINDS):
                    out = torch.zeros_like(xs[0])
                    run_call(executor, plan_of(kind, out), xs[comm.rank], out)
                    check(out, tree_sum(xs, nodes, kind), (border, kind))
            return int(executor.epoch)


def in_pieces(nodes: int) -> int:
    """Sum messages that are longer than the cells between nodes. Return the number of pieces."""
    from shotcast.transport.triton import layout

    layout.NETWORK_BYTES = 64 << 10
    pieces = 0
    with (
        shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm,
        executor_of(comm, nodes, 1 << 16) as executor,
    ):
        for kind in (*KINDS, *ROUNDED):
            for name, count in (("bfloat16", 30_001), ("float16" if kind in ROUNDED else "float32", 20_003)):
                xs = inputs(count, FLOATS[name], comm.world_size, 9, "cpu")
                out = torch.zeros_like(xs[0])
                plan = plan_of(kind, out, 3, 512)
                made = executor.pieces(plan)
                assert len(made) > 1
                pieces += len(made)
                run_call(executor, plan, xs[comm.rank], out)
                check(out, tree_sum(xs, nodes, kind), (kind, name, count))
    return pieces


def failures(nodes: int, kind: str, fault: str, victim: int) -> Any:
    """Have a rank come late, send its header alone, or call with another size. Return the fault, and if out is NaN."""
    from shotcast.transport.triton import sync

    timeout_s = 1.5
    with (
        shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm,
        executor_of(comm, nodes, 1 << 16, timeout_s) as executor,
    ):
        x = torch.ones(600, dtype=torch.bfloat16 if kind in ROUNDED else torch.float32)
        for _ in range(3):
            out = torch.zeros_like(x)
            run_call(executor, plan_of(kind, x), x, out)
            assert bool((out == comm.world_size).all()), executor.fault()
        comm._host.barrier()
        programs = 0

        def stall(pdl: Any) -> None:
            nonlocal programs
            programs += 1
            if programs == 2:  # the first program exchanges the headers
                time.sleep(timeout_s + 2)

        if comm.rank == victim:
            if fault == "late":
                time.sleep(timeout_s + 2)
            elif fault == "differs":
                x = torch.ones(608, dtype=x.dtype)
            else:
                from shotcast.transport.triton import nvrar

                nvrar.await_prior_kernel = stall
        out = torch.zeros_like(x)
        run_call(executor, plan_of(kind, x), x, out)
        nan = bool(out.isnan().all())
        assert sync is not None
        seen = executor.fault()
        comm._host.barrier()
        return seen, nan
