"""Register an all-reduce of your own: a Triton kernel with the project's synchronisation, run here by the interpreter.

    python examples/06_own_algorithm.py
    torchrun --nproc-per-node 3 examples/06_own_algorithm.py

The algorithm is a star: every rank sends its message to rank 0, which adds up in rank order and sends the sum to all.
Its sums have the bits of the numerics contract, so ``auto`` may choose it, and the cost model predicts that it loses.
Command lines find it by SHOTCAST_ALGORITHMS:

    SHOTCAST_ALGORITHMS=examples/06_own_algorithm.py shotcast bench all-reduce --device cpu --algorithms star,ring
"""

import importlib.util
import os
import sys

import torch
import torch.distributed as dist

if __name__ == "__main__" and importlib.util.find_spec("triton") is None:
    sys.exit("this example needs Triton: pip install 'shotcast[triton]'")
if not torch.cuda.is_available():
    # CPU ranks run Triton kernels by the interpreter, if they are told so before Triton is imported
    os.environ.setdefault("SHOTCAST_CPU_KERNELS", "interpreter")
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton.language as tl

import shotcast
from shotcast.device.triton.intrinsics import kernel, release_next_kernel
from shotcast.device.triton.words import load_words, nan_unless, store_words, sum_words
from shotcast.transport.triton.binding import KernelContext, KernelLaunch, TileShape
from shotcast.transport.triton.sync import (
    await_words,
    clear_previous,
    enter,
    escape_sentinel,
    exchange_headers,
    leave_epoch,
    peer_addresses,
    region_address,
    slots_offset,
    store_to,
)
from shotcast.wire import CallPlan, Op


@kernel(shape=TileShape)
def star_all_reduce(x, out, entry, nbytes, slots_at, slots_quads, SHAPE: tl.constexpr):
    """Rank r has slot r of rank 0; slot WORLD of every rank is for the sum. Program 0 exchanges headers."""
    rank = entry.rank
    WORLD: tl.constexpr = SHAPE.WORLD
    BLOCK: tl.constexpr = SHAPE.BLOCK
    call = enter(entry, SHAPE.WARPS, SHAPE.PDL)
    quads = (nbytes + 15) // 16  # of a slot, 16 bytes each
    extent = quads * (WORLD + 1)
    if tl.program_id(0) == 0:
        exchange_headers(call, extent, True, WORLD, SHAPE.WARPS, SHAPE.PDL)
    else:
        worker = tl.program_id(0) - 1
        workers = tl.num_programs(0) - 1
        slots = slots_offset(call.generation, slots_at, slots_quads)
        total_slot = slots + quads * WORLD
        root = region_address(entry.peers, 0)
        everyone = peer_addresses(entry.peers, rank, worker, WORLD, False)
        for start in range(worker * BLOCK, quads * 4, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            words = escape_sentinel(load_words(x, 0, offs, nbytes, SHAPE.UNIT))
            store_to(call, root, slots + rank * quads, offs, words, offs < quads * 4, False)
        leave_epoch(call, extent, True)
        release_next_kernel(SHAPE.PDL)
        clear_previous(call, slots_at, slots_quads, worker, workers, BLOCK)
        for start in range(worker * BLOCK, quads * 4, workers * BLOCK):
            offs = start + tl.arange(0, BLOCK)
            inside = offs < quads * 4
            masks = ()
            for _ in tl.static_range(WORLD):
                masks = masks + (inside & (rank == 0),)  # other ranks wait for the sum alone
            parts, call = await_words(call, slots, quads, offs, masks, 0, False, WORLD, WORLD)
            total = escape_sentinel(sum_words(parts, WORLD, SHAPE.DTYPE))
            for i in tl.static_range(WORLD):
                store_to(call, everyone[i], total_slot, offs, total, inside & (rank == 0), False)
            words, call = await_words(call, total_slot, 0, offs, (inside,), 0, False, 1, WORLD, True)
            store_words(out, 0, offs, nan_unless(call.live, words[0], SHAPE.DTYPE), nbytes, SHAPE.UNIT)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch: the context fills in all arguments that the kernel has, and SHAPE, by their usual names."""
    return context.launch(star_all_reduce, plan)


def work(nbytes: int, shape: shotcast.NodeShape, itemsize: int) -> shotcast.Work:
    """Return the work of rank 0, for the cost model: two steps, a message to each peer, all messages taken in."""
    ranks = shape.world_size
    return shotcast.Work(steps=2, sent=(ranks - 1) * nbytes, taken=ranks * nbytes).over(shape)


def workspace(problem: shotcast.CollectiveProblem) -> shotcast.Workspace:
    """Return what a call needs of the workspace, and what there is: two messages of the largest size."""
    slots = problem.topology.world_size + 1
    return shotcast.Workspace(needed=slots * problem.nbytes, capacity=2 * problem.topology.max_bytes)


shotcast.register_algorithm(
    shotcast.Algorithm(
        name="star",
        label="star",
        summary="every rank sends its message to rank 0, which adds up and sends the sum to all",
        forms={Op.ALL_REDUCE: shotcast.Form(work=work, triton=bind, workspace=workspace)},
    )
)


def reduce() -> tuple[list[float], str]:
    with shotcast.Communicator() as comm:  # compares the registrations of all ranks, and checks the sums of each
        x = torch.full([5], 10.0**comm.rank, device=comm.device)
        return comm.all_reduce(x, algorithm="star").tolist(), str(comm.explain(x))


if __name__ == "__main__":
    # torchrun starts a process for each rank; without it, this process starts them
    results = [reduce()] if dist.is_torchelastic_launched() else shotcast.spawn(reduce, 3)
    for total, _ in results:
        print("star:", total)
    if os.environ.get("RANK", "0") == "0":
        print(results[0][1])
