"""Functions that CPU ranks on several nodes run, as logical nodes of one machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from workers import check, inputs

import shotcast
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
    """Check operations that no own kernel carries between nodes. Return the reasons, by operation."""
    with shotcast.Communicator(device="cpu", timeout_s=20) as comm:
        rank, size = comm.rank, comm.world_size
        xs = [torch.arange(6.0 * size).view(size, 6) + 100 * r for r in range(size)]
        x = xs[rank]
        comm.barrier()
        assert torch.equal(comm.all_gather(x[:1]), torch.cat([one[:1] for one in xs]))
        assert torch.equal(comm.broadcast(x.clone(), 1), xs[1])
        assert comm.all_reduce(x[:1], reduction="max")[0, 0] == 100 * (size - 1)
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
        total = reference.tree_all_reduce(xs, rank, comm.topology.layout)
        for algorithm in comm.candidates(x, "all_reduce_rms_norm"):
            normed, new_residual = comm.all_reduce_rms_norm(x, residual, weight, algorithm=algorithm)
            check(new_residual, reference.add_residual(total, residual), ("new residual", algorithm))
            assert torch.allclose(normed, reference.rms_norm(new_residual, weight, 1e-6))
        comm.check()
        cost = comm.topology.network_cost
        assert len(set(comm._host.all_gather(cost))) == 1, "so all choose alike"
        assert all(1.0 < one < 1e6 for one in (cost.step_us, cost.to_all[0]))
        assert all(1e-3 < one < 1e3 for one in (cost.bw_gbps, cost.to_all[1]))
        names = ("all_reduce", "all_gather", "send", "barrier", "reduce_scatter", "all_reduce_rms_norm")
        return {name: str(comm.explain(x, name)) for name in names}


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
        expected = reference.tree_all_reduce(xs, comm.rank, comm.topology.layout)
        check(comm.all_reduce(xs[comm.rank]), expected, "after reset")
    return seen


def killed(victim: int) -> tuple[Outcome, Outcome]:
    """Return what this rank sees of the end of another, in a call and at the next one."""
    comm = shotcast.Communicator(device="cpu", timeout_s=60)
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
    with shotcast.Communicator(device="cpu", timeout_s=20) as comm:
        chosen = []
        for color in (comm.rank % 2, comm.rank // 2):
            child = comm.split(color)
            assert child is not None
            with child:
                xs = inputs(100, torch.float32, child.world_size, 1, "cpu")
                expected = reference.tree_all_reduce(xs, child.rank, child.topology.layout)
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
                check(comm.all_reduce(x, algorithm=name), reference.all_reduce(xs, name, layout), (name, count))
            check(comm.all_reduce(x), reference.tree_all_reduce(xs, comm.rank, layout), ("auto", count))
            check(comm.all_gather(x), torch.cat(xs), ("all_gather", count))
        xs = inputs(64, torch.bfloat16, comm.world_size, 5, "cpu")
        x, residual, weight = xs[comm.rank].view(4, 16), torch.ones(4, 16).bfloat16(), torch.ones(16).bfloat16()
        _, new_residual = comm.all_reduce_rms_norm(x, residual, weight)
        total = reference.tree_all_reduce(xs, comm.rank, layout).view(4, 16)
        check(new_residual, reference.add_residual(total, residual), "new residual")
        return {name: str(comm.explain(x, name)) for name in ("all_reduce", "all_reduce_rms_norm", "reduce_scatter")}
