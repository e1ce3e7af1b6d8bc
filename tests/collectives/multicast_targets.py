"""Functions that the ranks of tests/collectives/test_multicast.py run: multicast forms over an emulated address.

Stores to peers use the addresses of a table that the kernels read. Multicast stores and loads use an address without
memory, so one that bypasses the emulation ends the process.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import expected_results
import fused_targets
import torch
from workers import FLOATS, check, differing, failing_call, inputs, shifted, straggle, warm

import shotcast
from shotcast.collectives import reference
from shotcast.wire import Op

LATE_S = 3.5
"""Seconds after the deadline at which a late rank comes. A poll of the interpreter can take 10 ms on a busy machine."""


def traffic(comm: shotcast.Communicator) -> tuple[int, int]:
    """Return the number of quads stored, and of quads summed, by multicast so far."""
    traffic = comm._executor.workspaces[0].memory._block.buffer.traffic
    return traffic.stored_quads, traffic.summed_quads


def quads(nbytes: int) -> int:
    return -(-nbytes // 16)


def slice_quads(nbytes: int, rank: int, world_size: int) -> int:
    """Return the number of quads in a rank's slice of a message, computed here from the sizes alone."""
    width = -(-quads(nbytes) // world_size)
    return max(0, min(width, quads(nbytes) - rank * width))


def every_form(counts: list[int], seed: int) -> int:
    """Check the bits and the traffic of all uses of multicast, over dtypes and counts.

    Every other tensor is unaligned. Return the number of combinations.
    """
    done = 0
    with shotcast.Communicator(device="cpu", max_bytes=1 << 17, timeout_s=60) as comm:
        assert comm.topology.multicast
        rank, size = comm.rank, comm.world_size
        rng = random.Random(rank)
        for (name, dtype), count in itertools.product(FLOATS.items(), counts):
            shift = done % 2
            xs = inputs(count, dtype, size, seed + count, "cpu")
            nbytes = count * dtype.itemsize
            mine = slice_quads(nbytes, rank, size)
            for algorithm, summed in (("two_shot", 0), ("multimem", mine)):
                straggle(comm, rng)
                before = traffic(comm)
                x = shifted(xs[rank], shift)
                got = comm.all_reduce(x, out=x if done % 3 == 0 else None, algorithm=algorithm)
                check(got, reference.ordered_sum(xs), (name, count, shift, algorithm))
                assert traffic(comm) == (before[0] + mine, before[1] + summed), (name, count, shift, algorithm)
            before = traffic(comm)
            check(
                comm.all_gather(shifted(xs[rank], shift), algorithm="one_shot"), torch.cat(xs), (name, count, "gather")
            )
            assert traffic(comm) == (before[0] + quads(nbytes), before[1])
            root = count % size
            got = comm.broadcast(shifted(xs[rank], shift), root)
            check(got, xs[root], (name, count, "broadcast"))
            assert traffic(comm) == (before[0] + quads(nbytes) * (1 + (rank == root)), before[1])
            before = traffic(comm)
            if done % 2:
                lengths = [max(0, count - 3 * r) for r in range(size)]
                got = comm.all_gather(shifted(xs[rank][: lengths[rank]], shift), sizes=lengths)
                check(got, torch.cat([x[:n] for x, n in zip(xs, lengths, strict=True)]), (name, count, "uneven"))
                assert traffic(comm) == (before[0] + quads(lengths[rank] * dtype.itemsize), before[1])
            else:
                cells = [x.view(torch.int16 if dtype.itemsize == 2 else torch.int32) for x in xs]
                check(comm.all_gather(cells[rank]), torch.cat(cells), (name, count, "cells"))
                assert traffic(comm) == before, "flag cells go by peer stores"
            done += 1
        comm.check()
    return done


def fused_forms(listed: list[fused_targets.Case], op: Op) -> int:
    """Compare fused calls as tests/collectives/test_interpreter_fused.py does.

    Return the quads that went by multicast.
    """
    from shotcast.transport.triton import multicast

    earlier = list(multicast._emulated)
    fused_targets.cases("cpu", listed, [op], 1 << 18, 2)
    return sum(area.stored_quads for area in multicast._emulated if area not in earlier)


def changing_sizes_by_multicast(calls: int, largest: int, seed: int) -> int:
    """Make calls of random size and kind, so that each finds the words of others, also multimem, in its generation."""
    with shotcast.Communicator(device="cpu", timeout_s=60, max_bytes=max(largest * 8, 1 << 16)) as comm:
        rank, size = comm.rank, comm.world_size
        shared, own = random.Random(seed), random.Random(seed * 100 + rank)
        pools = {name: inputs(largest, dtype, size, seed, "cpu") for name, dtype in FLOATS.items()}
        for number in range(calls):
            name = shared.choice(list(FLOATS))
            count = int(largest ** shared.random())
            xs = [x[:count] for x in pools[name]]
            straggle(comm, own)
            kind = shared.choice(["multimem", "multimem", "two_shot", "one_shot", "ring", "gather", "barrier"])
            if kind == "gather":
                got, wanted = comm.all_gather(xs[rank]), torch.cat(xs)
            elif kind == "barrier":
                comm.barrier()
                continue
            else:
                got = comm.all_reduce(xs[rank], algorithm=kind)
                # The switch may round differently, so multimem has no reference. The emulated switch adds in rank
                # order.
                wanted = reference.ordered_sum(xs) if kind == "multimem" else expected_results.all_reduce(xs, kind)
            assert int(differing(got, wanted)) == 0, (number, name, count, kind)
        comm.check()
        return calls


def sums_of_sentinels(count: int) -> list[bool]:
    """Sum sentinel words by multimem: the sums arrive as NaN and no rank waits. Return whether each output was NaN."""
    nans = []
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=100) as comm:
        for dtype in FLOATS.values():
            x = torch.full([count], -1, dtype=torch.int32).view(dtype)
            nans.append(bool(comm.all_reduce(x, algorithm="multimem").isnan().all()))
            # One half of each word is that of the sentinel, the other half a number.
            mixed = torch.tensor([0xFFFF, 0x3C00] * count, dtype=torch.int32).to(torch.int16).view(torch.float16)
            if dtype is torch.float16:
                got = comm.all_reduce(mixed, algorithm="multimem")
                check(got, reference.ordered_sum([mixed] * comm.world_size), "mixed")
        comm.check()
    return nans


def silent_after_its_header(victim: int, timeout_s: float) -> dict[str, Any]:
    """Have rank ``victim`` exchange headers and send no data. Only the flags can tell the others who it is."""
    from shotcast.transport.triton import sync

    with shotcast.Communicator(device="cpu", timeout_s=100, max_bytes=1 << 18, exclusive=True) as comm:
        warm(comm, "multimem")
        comm._host.barrier()
        programs = 0

        def stall(pdl: Any) -> None:
            nonlocal programs
            programs += 1
            if programs == 2:  # the first program exchanges the headers
                comm._host.barrier()  # the others have given up

        if comm.rank == victim:
            sync.await_prior_kernel = stall
        else:
            comm.set_timeout(timeout_s)
        error, took, nan = failing_call(comm, "multimem")
        for _ in range(1 if comm.rank == victim else 2):
            comm._host.barrier()
        return {"error": error, "took": took, "nan": nan}


def summed(xs: list[torch.Tensor], algorithm: str) -> torch.Tensor:
    """Return the sum by an algorithm; multimem, which has no reference, adds in rank order where it is emulated."""
    return reference.ordered_sum(xs) if algorithm == "multimem" else expected_results.all_reduce(xs, algorithm)


def reset_by_multicast(late: int, timeout_s: float) -> dict[str, Any]:
    """Bring rank ``late`` after the deadline of a multimem call, reset all ranks, and check the results."""
    with shotcast.Communicator(device="cpu", timeout_s=timeout_s, max_bytes=1 << 18) as comm:
        warm(comm, "multimem")
        comm._host.barrier()
        if comm.rank == late:
            time.sleep(timeout_s + LATE_S)
        error, took, nan = failing_call(comm, "multimem")
        comm.reset()
        xs = inputs(1000, torch.bfloat16, comm.world_size, 3, "cpu")
        for _ in range(4):
            for name in ("multimem", "two_shot", "one_shot"):
                check(comm.all_reduce(xs[comm.rank], algorithm=name), summed(xs, name), "after reset")
        comm.check()
        return {"error": error, "took": took, "nan": nan}


def explained() -> dict[str, Any]:
    """Return the candidates and the choice of communicators that have a multicast address."""
    with shotcast.Communicator(device="cpu", timeout_s=100, max_bytes=1 << 16) as comm:
        x = torch.ones(64)
        return {
            "candidates": comm.candidates(x),
            "auto": comm.explain(x).algorithm,
            "candidates of a gather": comm.candidates(x, "all_gather"),
        }
