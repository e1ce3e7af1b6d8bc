"""Functions that CPU ranks on several nodes run, as logical nodes of one machine."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import expected_results
import torch
from communicator_targets import DTYPES, patterns
from workers import check, inputs, shifted

import shotcast
from shotcast import wire
from shotcast.collectives import reference

Outcome = tuple[str, Any, float]
"""The class of an error, what it names, and the seconds until it came."""


def outcome(call: Callable[[], object]) -> Outcome:
    begun = time.monotonic()
    try:
        call()
    except shotcast.CollectiveTimeout as error:
        return "CollectiveTimeout", (error.reason, error.missing, error.where), time.monotonic() - begun
    except shotcast.CollectiveMismatch as error:
        return "CollectiveMismatch", (error.differing, error.fields), time.monotonic() - begun
    return "", (), time.monotonic() - begun


def other_operations() -> dict[str, str]:
    """Check operations that no native kernel carries between nodes. Return the reasons, by operation."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        xs = [torch.arange(6.0 * size).view(size, 6) + 100 * r for r in range(size)]
        x = xs[rank]
        comm.barrier()
        assert torch.equal(comm.all_gather(x[:1]), torch.cat([one[:1] for one in xs]))
        assert torch.equal(comm.broadcast(x.clone(), 1), xs[1])
        total = comm.reduce(x, 1)
        assert torch.equal(total, torch.stack(xs).sum(0)) if rank == 1 else not total.numel()
        assert comm.all_reduce(x[:1], reduction="prod")[0, 0] == 0
        received = torch.empty(5)
        for _ in range(3):  # the first call connects
            if rank == 0:
                comm.send(torch.full([5], 7.0), size - 1)
            elif rank == size - 1:
                assert comm.recv(received, 0).tolist() == [7.0] * 5
        for count in (5, 1000, 12_000, 1 << 20):
            message = torch.full([count], float(count))
            ahead = comm.waiting_messages(message)
            assert (ahead > 0) == (count < 1 << 20)
            for number in range(ahead if rank == 0 else 0):
                comm.send(message + number, size - 1)
            comm.barrier()  # which the sender reaches before anybody receives
            for number in range(ahead if rank == size - 1 else 0):
                check(comm.recv(torch.empty(count), 0), message + number, ("message", count, number))
        residual, weight = torch.ones(size, 6), torch.full([6], 0.5)
        total = reference.tree_sum(xs, comm.topology.layout)
        for algorithm in comm.candidates(x, "all_reduce_rms_norm"):
            normed, new_residual = comm.all_reduce_rms_norm(x, residual, weight, algorithm=algorithm)
            check(new_residual, reference.add_residual(total, residual), ("new residual", algorithm))
            assert torch.allclose(normed, reference.rms_norm(new_residual, weight, 1e-6))
            normed, _ = comm.all_reduce_layer_norm(x, residual, weight, weight, algorithm=algorithm)
            assert torch.allclose(normed, reference.layer_norm(new_residual, weight, weight, 1e-5), atol=1e-6)
        comm.check()
        cost = comm.topology.network.cost
        assert len(set(comm._host.all_gather(cost))) == 1, "so all choose alike"
        assert all(1.0 < one < 1e6 for one in (cost.step_us, cost.to_all[0]))
        assert all(1e-3 < one < 1e3 for one in (cost.bw_gbps, cost.to_all[1]))
        names = ("all_reduce", "all_gather", "send", "barrier", "reduce_scatter", "reduce", "all_reduce_rms_norm")
        return {name: str(comm.explain(x, name)) for name in names}


def reductions() -> dict[str, str]:
    """Check reduces and all reductions but sums between nodes, bit by bit. Return who serves them, and why."""
    found = {}
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size, layout = comm.rank, comm.world_size, comm.topology.layout
        for number, (dtype, count) in enumerate(itertools.product(DTYPES.values(), (0, 1, 13, 4099))):
            xs = [patterns(count, dtype, 100 * number + r) for r in range(size)]
            name, root = str(dtype).removeprefix("torch."), number % size
            for reduction in wire.REDUCED.get(name, ()):
                what = (name, count, reduction, root)
                sums = reduction == "sum" and name in wire.REDUCIBLE
                wanted = reference.tree_sum(xs, layout) if sums else expected_results.reduced(xs, reduction)
                x = shifted(xs[rank], number % 2)
                explained = comm.explain(x, "reduce", reduction=reduction)
                found[f"{reduction} of {name}"] = str(explained)
                if explained.algorithm != "nvrar_pairs":
                    continue
                out = x.clone() if number % 3 else None
                got = comm.reduce(x if out is None else out, root, out=out, reduction=reduction)
                if rank == root:
                    check(got, wanted, what)
                else:
                    assert got.numel() == 0, what
                    assert out is None or out.numel() == 0 or same(out, xs[rank]), (*what, "left alone")
                check(comm.all_reduce(x, reduction=reduction, algorithm="nvrar_pairs"), wanted, what)
        whole = torch.arange(200_003, dtype=torch.int64) * 2**rank
        wanted = expected_results.reduced([torch.arange(200_003, dtype=torch.int64) * 2**r for r in range(size)], "bor")
        got = comm.reduce(whole, 1, reduction="bor")
        assert torch.equal(got, wanted if rank == 1 else wanted[:0]), "a slice in several pieces"
        comm.check()
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes."""
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def faults() -> list[Outcome]:
    """Return what this rank sees of a late rank, of other calls, and of a message that nobody receives."""
    seen = []
    with shotcast.Communicator(device="cpu", timeout_s=0.6) as comm:
        x = torch.ones(1000)
        last = comm.world_size - 1
        comm.all_reduce(x, algorithm="nvrar")
        if comm.rank == last:
            time.sleep(1.5)
        seen.append(outcome(lambda: comm.all_reduce(x, algorithm="nvrar")))
        comm.reset()
        other = x[:500] if comm.rank == last else x
        seen.append(outcome(lambda: comm.all_reduce(other, algorithm="nvrar")))
        comm.reset()
        xs = inputs(300, torch.bfloat16, comm.world_size, 3, "cpu")
        expected = reference.tree_sum(xs, comm.topology.layout)
        check(comm.all_reduce(xs[comm.rank]), expected, "after reset")
        comm.reduce(x, 0)
        if comm.rank == last:
            time.sleep(1.5)
        seen.append(outcome(lambda: (comm.reduce(x, 0), comm.barrier())))
        comm.reset()
        root = 1 if comm.rank == last else 0
        seen.append(outcome(lambda: (comm.reduce(x, root), comm.barrier())))
        comm.reset()
        got = comm.reduce(xs[comm.rank], last)
        check(got, expected if comm.rank == last else got, "after another reset")
    return seen


def killed(victim: int) -> tuple[Outcome, Outcome]:
    """Return what this rank sees of the end of another, in a call and at the next one."""
    comm = shotcast.Communicator(device="cpu", timeout_s=300)
    x = torch.ones(1000)
    comm.all_reduce(x)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    first = outcome(lambda: comm.all_reduce(x))
    again = outcome(lambda: comm.all_reduce(x))
    comm.close()
    return first, again


def with_a_short_deadline() -> list[float]:
    """Return a sum of a communicator whose deadline is shorter than the skew of ranks at its construction."""
    if os.environ["RANK"] == "0":
        time.sleep(0.2)
    with shotcast.Communicator(device="cpu", timeout_s=1e-3) as comm:
        assert comm._executor.timeout_s == 1e-3  # type: ignore[union-attr]
        comm.set_timeout(20.0)
        return comm.all_reduce(torch.ones(3)).tolist()


def splits() -> list[str]:
    """Check sums of splits across nodes and within them. Return the algorithms that serve them."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        chosen = []
        for color in (comm.rank % 2, comm.rank // 2):
            child = comm.split(color)
            assert child is not None
            with child:
                xs = inputs(100, torch.float32, child.world_size, 1, "cpu")
                expected = reference.tree_sum(xs, child.topology.layout)
                check(child.all_reduce(xs[child.rank]), expected, color)
                chosen.append(str(child.explain(xs[0])))
        return chosen


def by_peer_stores(counts: list[int]) -> dict[str, str]:
    """Check calls of the GPUs' kernels on logical nodes, whose memory is mapped. Return what explain says."""
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        layout = comm.topology.layout
        for count in counts:
            xs = inputs(count, torch.bfloat16, comm.world_size, count, "cpu")
            x = xs[comm.rank]
            names = [name for name in comm.candidates(x) if name not in ("vendor", "two_shot_fp8")]
            for name in names:
                check(comm.all_reduce(x, algorithm=name), expected_results.all_reduce(xs, name, layout), (name, count))
            check(comm.all_reduce(x), reference.tree_sum(xs, layout), ("auto", count))
            check(comm.all_gather(x), torch.cat(xs), ("all_gather", count))
        xs = inputs(64, torch.bfloat16, comm.world_size, 5, "cpu")
        x, residual, weight = xs[comm.rank].view(4, 16), torch.ones(4, 16).bfloat16(), torch.ones(16).bfloat16()
        _, new_residual = comm.all_reduce_rms_norm(x, residual, weight)
        total = reference.tree_sum(xs, layout).view(4, 16)
        check(new_residual, reference.add_residual(total, residual), "new residual")
        return {name: str(comm.explain(x, name)) for name in ("all_reduce", "all_reduce_rms_norm", "reduce_scatter")}
