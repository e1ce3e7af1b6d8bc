"""Functions that the ranks of tests/collectives/test_puts.py run: nodes that reach each other by puts alone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import node_kernel_targets
import torch
from node_kernel_targets import ALGORITHMS, KINDS, layout_of, plan_of, tree_sum
from workers import check, inputs

import emulated_puts
import shotcast
from executor_calls import run_call
from shotcast.transport.transport import Ranks


@contextlib.contextmanager
def executor_of(comm: shotcast.Communicator, nodes: int, max_bytes: int, timeout_s: float = 60.0) -> Iterator[Any]:
    """Make an executor for the ranks of ``comm`` on so many hosts."""
    from shotcast.transport.triton.hosts import HostsTritonExecutor

    host, layout = comm._host, layout_of(nodes, comm.world_size)
    mates = layout.members[layout.node_of(host.rank)]
    ranks = Ranks(host, layout, False, comm.device, max_bytes, timeout_s, ALGORITHMS)
    executor = HostsTritonExecutor(ranks, lambda nbytes: emulated_puts.EmulatedLease(host, nbytes, mates))
    try:
        if max_bytes > executor.capacity:
            executor.grow(max_bytes)
        yield executor
        executor.drain()
        host.barrier()
    finally:
        executor.close()


def with_puts(fn: Callable[..., Any], longest_s: float, *args: Any) -> Any:
    """Run a function of ``node_kernel_targets`` with puts that take up to ``longest_s``."""
    emulated_puts.emulate(longest_s, int(os.environ["RANK"]))
    with mock.patch.object(node_kernel_targets, "executor_of", executor_of):
        return fn(*args)


def with_headers_late(fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn`` with grids of which every second has its first program, which awaits all headers, interpreted last.

    So a rank may stage words of a call while a peer still awaits those of the call before, as it may on a GPU.
    """
    from triton.runtime.interpreter import interpreter_builder

    set_index, grids = interpreter_builder.set_grid_idx, 0

    def set_in_turn(x: int, y: int, z: int) -> None:
        nonlocal grids
        grids += x == 0
        set_index(interpreter_builder.grid_dim[0] - 1 - x if grids % 2 else x, y, z)

    with mock.patch.object(interpreter_builder, "set_grid_idx", set_in_turn):
        return fn(*args)


def with_one_generation_of_staging(fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn`` with kernels that stage all words where the call before did."""
    from shotcast.transport.triton import network

    enter = network.enter_network

    def enter_wrongly(call: Any, quads: Any, staging_at: Any, *others: Any) -> Any:
        return enter(call, quads, staging_at, *others)._replace(staging=staging_at)

    from shotcast.transport.triton import nvrar

    with mock.patch.object(nvrar, "enter_network", enter_wrongly):
        return fn(*args)


def wrong_sums(nodes: int, calls: int) -> int:
    """Return how many of ``calls`` of one size give wrong sums or end at the deadline."""
    wrong = 0
    with (
        shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm,
        executor_of(comm, nodes, 1 << 16, 3.0) as executor,
    ):
        for number in range(calls):
            xs = inputs(40, torch.float32, comm.world_size, number, "cpu")
            out = torch.zeros_like(xs[0])
            run_call(executor, plan_of("nvrar", out, 1, 64), xs[comm.rank], out)
            if executor.fault() is not None:
                return wrong + calls - number
            try:
                check(out, tree_sum(xs, nodes), number)
            except AssertionError:
                wrong += 1
    return wrong


def bytes_put(nodes: int, nbytes: int) -> dict[str, int]:
    """Return the bytes that this rank puts in a call beside headers, by algorithm and bytes of an element."""
    adapter, header = emulated_puts.emulate(), 16
    found = {}
    with (
        shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm,
        executor_of(comm, nodes, 1 << 16) as executor,
    ):
        for kind in (*KINDS, "nvrar_16bit"):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
                if kind == "nvrar_16bit" and dtype == torch.float32:
                    continue
                begin = len(adapter.sizes)
                run_call(executor, plan_of(kind, x, 2, 64), x, torch.zeros_like(x))
                assert executor.fault() is None
                found[f"{kind} {dtype.itemsize}"] = sum(size for size in adapter.sizes[begin:] if size > header)
    return found


def after_reset(nodes: int) -> tuple[Any, bool]:
    """Have the last rank come late, reset, and sum again. Return the fault, and whether the sum is right."""
    emulated_puts.emulate(0.05)
    with (
        shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm,
        executor_of(comm, nodes, 1 << 16, 1.0) as executor,
    ):
        x, out = torch.ones(600), torch.zeros(600)
        call = executor.bind(plan_of("nvrar", x))
        call.run(x, out)
        comm._host.barrier()
        if comm.rank == comm.world_size - 1:
            time.sleep(3.0)
        call.run(x, out)
        fault = executor.fault()
        comm._host.barrier()
        executor.clear(executor.epoch)
        comm._host.barrier()
        call.run(x, out)
        return fault, executor.fault() is None and bool((out == comm.world_size).all())


def reset_without_a_farewell(nodes: int) -> tuple[list[int], bool]:
    """Reset while no farewell reaches rank 0, which is slow. Return who is taken for dead, and if a sum is right."""
    emulated_puts.emulate()
    with (
        shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm,
        executor_of(comm, nodes, 1 << 16, 60.0) as executor,
    ):
        x, out, dead = torch.ones(600), torch.zeros(600), []
        executor._ended = dead.append
        call = executor.bind(plan_of("nvrar", x))
        call.run(x, out)
        comm._host.barrier()
        if comm.rank == 0:
            time.sleep(0.5)
        else:
            say = executor._control._send
            executor._control._send = lambda node, message: "farewell" in message or say(node, message)
        executor.clear(executor.epoch)
        comm._host.barrier()
        call.run(x, out)
        return dead, bool((out == comm.world_size).all())


def heard_while_idle(nodes: int) -> float:
    """Have rank 0 alone make a call. Return how long after it began the fault is known."""
    emulated_puts.emulate()
    with (
        shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm,
        executor_of(comm, nodes, 1 << 16, 0.5) as executor,
    ):
        x, out = torch.ones(600), torch.zeros(600)
        began = time.monotonic()
        comm._host.barrier()
        if comm.rank == 0:
            run_call(executor, plan_of("nvrar", x), x, out)
        while executor.fault() is None and time.monotonic() < began + 60:
            time.sleep(0.005)
        took = time.monotonic() - began
        fault = executor.fault()
        assert fault is not None
        assert executor.stopped
        assert set(fault.ranks) <= set(range(1, comm.world_size)), fault
        comm._host.barrier()
        return took


def killed(nodes: int) -> Any:
    """Have the last rank die. Return the fault that the others see, and how long they waited for it."""
    emulated_puts.emulate()
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        context = executor_of(comm, nodes, 1 << 16, 300.0)
        executor = context.__enter__()
        x, out = torch.ones(600), torch.zeros(600)
        run_call(executor, plan_of("nvrar", x), x, out)
        comm._host.barrier()
        if comm.rank == comm.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        run_call(executor, plan_of("nvrar", x), x, out)
        took = time.monotonic() - began
        fault = executor.fault()
        executor.close()
        return fault, took


def communicator(nodes: int, timeout_s: float = 60.0) -> shotcast.Communicator:
    """Return a communicator over hosts that put to each other, as that of GPUs is."""
    from shotcast.collectives import communicator as module
    from shotcast.cost.collective import NetworkCost
    from shotcast.transport.transport import Built, Network, Transport
    from shotcast.transport.triton.hosts import HostsTritonExecutor

    def build(transport: Transport, ranks: Ranks) -> tuple[Transport, Built]:
        mates = ranks.layout.members[ranks.layout.node_of(ranks.host.rank)]
        executor = HostsTritonExecutor(
            ranks._replace(exclusive=True), lambda nbytes: emulated_puts.EmulatedLease(ranks.host, nbytes, mates)
        )
        return transport, Built(executor, network=Network("nvshmem", NetworkCost(5.0, 20.0), puts=True))

    world_size = int(os.environ["WORLD_SIZE"])
    with (
        mock.patch.object(module, "build_executor", build),
        mock.patch.dict(os.environ, {"SHOTCAST_RANKS_PER_NODE": str(world_size // nodes)}),
    ):
        return shotcast.Communicator(device="cpu", max_bytes=64 << 20, timeout_s=timeout_s)


def through_a_communicator(nodes: int) -> tuple[list[str], str, str]:
    """Make calls of all kinds, also after growth and a reset. Return the candidates of a sum, and two explanations."""
    emulated_puts.emulate()
    with communicator(nodes) as comm:
        assert comm._executor is not None
        xs = inputs(600, torch.float32, comm.world_size, 1, "cpu")
        x = xs[comm.rank]
        own = [name for name in comm.candidates(x) if name != "vendor"]
        for change in (lambda: None, lambda: comm._executor.grow(16 << 20), comm.reset):
            change()
            for name in own:
                check(comm.all_reduce(x, algorithm=name), tree_sum(xs, nodes), name)
            comm.barrier()
            check(comm.all_gather(x), torch.cat(xs), "all_gather")
            if comm.rank == 0:
                comm.send(x, comm.world_size - 1)
            elif comm.rank == comm.world_size - 1:
                check(comm.recv(torch.empty_like(x), 0), xs[0], "recv")
            comm.check()
        return own, str(comm.explain(x)), str(comm.explain(x, "all_gather"))
