"""Functions that the ranks of tests/collectives/test_operations.py run: calls with a root, uneven parts and more."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import expected_results
import pytest
import torch
from communicator_targets import DTYPES, patterns, same_bits
from workers import shifted

import shotcast
from shotcast import wire
from shotcast.collectives import reference

COUNTS = (0, 1, 13, 4099)
LARGE = 200_003


def refused(call: Callable[[], Any], kind: type[Exception] = shotcast.ConfigError) -> str:
    """Return the text of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def matrix_of(size: int, seed: int, most: int) -> list[list[int]]:
    """Return how many rows each rank sends to each: random numbers up to ``most``, with zeros."""
    numbers = random.Random(seed)
    return [[numbers.choice((0, numbers.randint(0, most))) for _ in range(size)] for _ in range(size)]


def copies(shift: int) -> list[str]:
    """Check gather, scatter and uneven all_to_all over all dtypes, bit by bit. Return who serves them."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        cases = [*itertools.product(DTYPES.items(), COUNTS[:3]), *itertools.product(list(DTYPES.items())[:2], (LARGE,))]
        for number, ((name, dtype), count) in enumerate(cases):
            xs = [patterns(count * size, dtype, 100 * number + r) for r in range(size)]
            x = shifted(xs[rank], shift)
            root, algorithm = number % size, ("auto", "one_shot", "vendor")[number % 3]
            what = (name, count, algorithm, root)
            got = comm.gather(x, root, algorithm=algorithm)
            same_bits(got, torch.cat(xs) if rank == root else x[:0], (*what, "gather"))
            own = xs[root][rank * count : (rank + 1) * count]
            same_bits(comm.scatter(x, root, algorithm=algorithm), own, (*what, "scatter"))
            out = shifted(torch.zeros(count, dtype=dtype), shift)
            assert comm.scatter(x if rank == root else None, root, out=out, algorithm=algorithm) is out
            same_bits(out, own, (*what, "scatter to out"))
            rows = matrix_of(size, number, count)
            parts = [xs[r][: sum(rows[r])].split(rows[r]) for r in range(size)]
            sizes = {"input_sizes": rows[rank], "output_sizes": [row[rank] for row in rows]}
            sent = shifted(xs[rank][: sum(rows[rank])], shift)
            got = comm.all_to_all(sent, algorithm=algorithm, **sizes)
            same_bits(got, torch.cat([part[rank] for part in parts]), (*what, "all_to_all"))
        x = torch.ones(4 * size)
        return [str(comm.explain(x, op)) for op in ("gather", "scatter", "all_to_all_uneven", "reduce")]


def reduces() -> int:
    """Check that a reduce has the bits of an all_reduce. Return the number of cases."""
    done = 0
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        for dtype, count in itertools.product((torch.float32, torch.float16, torch.bfloat16), (*COUNTS, LARGE)):
            xs = [patterns(count, dtype, 7 * count + r) for r in range(size)]
            xs = [torch.where(x.isfinite(), x, torch.ones_like(x)) if r else x for r, x in enumerate(xs)]
            wanted = reference.ordered_sum(xs)
            for algorithm in ("auto", "one_shot", "two_shot"):
                root = done % size
                x = xs[rank].clone()
                got = comm.reduce(x, root, algorithm=algorithm)
                if rank == root:
                    same_bits(torch.nan_to_num(got), torch.nan_to_num(wanted), (dtype, count, algorithm))
                    assert comm.reduce(x, root, out=x, algorithm=algorithm) is x
                    same_bits(x, got, "in place")
                else:
                    assert got.numel() == 0
                    comm.reduce(x, root, out=x, algorithm=algorithm)
                    same_bits(x, xs[rank], "left alone")
                done += 1
        x = torch.arange(5) + rank
        for name, algorithm in itertools.product(wire.REDUCED["int64"], ("one_shot", "two_shot")):
            got = comm.reduce(x, size - 1, reduction=name, algorithm=algorithm)
            wanted = expected_results.reduced([torch.arange(5) + r for r in range(size)], name)
            assert got.tolist() == (wanted.tolist() if rank == size - 1 else []), name
    return done


def shapes() -> None:
    """Check the shapes of results, and calls of one rank with itself."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        x = torch.full((2 * size, 3), float(rank))
        assert comm.gather(x, 0).shape == ((2 * size * size, 3) if rank == 0 else (0, 3))
        assert comm.scatter(x, 0).tolist() == [[0.0] * 3] * 2
        assert comm.reduce(x, size - 1).shape == (x.shape if rank == size - 1 else (0, 3))
        assert comm.gather(torch.tensor(2.0), 0).tolist() == [2.0] * (size if rank == 0 else 0)
        rows = [0] * size
        rows[(rank + 1) % size] = 3
        back = [0] * size
        back[(rank - 1) % size] = 3
        got = comm.all_to_all(torch.full((3, 2), float(rank)), input_sizes=rows, output_sizes=back)
        assert got.tolist() == [[(rank - 1) % size] * 2] * 3
        out = torch.empty(2 * size * size, 3)
        assert (comm.gather(x, 0, out=out) is out) == (rank == 0)
        for root in range(size):
            whole = torch.zeros(size, 2)
            own = whole[rank : rank + 1].fill_(float(rank))
            if comm.gather(own, root, out=whole) is whole:
                assert whole.tolist() == [[float(r)] * 2 for r in range(size)], "its own part is in place"
            whole = torch.arange(2.0 * size).view(size, 2) + root
            own = whole[rank : rank + 1]
            assert comm.scatter(whole, root, out=own).tolist() == [[2.0 * rank + root, 2.0 * rank + root + 1]]


def bad_arguments() -> dict[str, str]:
    """Return what is said of arguments that cannot be."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        x, other = torch.ones(2 * size), (rank + 1) % size
        even = [2] * size
        wrong = [3 if r == rank else 2 for r in range(size)]
        found = {
            "root": refused(lambda: comm.gather(x, size)),
            "rows": refused(lambda: comm.scatter(torch.ones(2 * size + 1), 0)),
            "no x": refused(lambda: comm.scatter(None, other)),
            "x of the root": refused(lambda: comm.scatter(None, rank, out=x)),
            "one of two": refused(lambda: comm.all_to_all(x, input_sizes=even)),
            "too few": refused(lambda: comm.all_to_all(x, input_sizes=even[1:], output_sizes=even)),
            "sum": refused(lambda: comm.all_to_all(x[1:], input_sizes=even, output_sizes=even)),
            "to itself": refused(lambda: comm.all_to_all(x, input_sizes=even, output_sizes=wrong)),
            "sms": refused(lambda: comm.all_to_all(x, input_sizes=even, output_sizes=even, sms=4)),
            "in place": refused(lambda: comm.all_to_all(x, out=x, input_sizes=even, output_sizes=even)),
            "ring": refused(lambda: comm.gather(x, 0, algorithm="ring")),
            "first part": refused(lambda: comm.gather(x[:2], 1, out=x))
            if rank == 1
            else "the rank's own part, from byte 8 on",
        }
        comm.barrier()
        return found


def strided() -> list[str]:
    """Make calls on strided tensors twice from one place. Return the warnings."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        rank, size = comm.rank, comm.world_size
        xs = [torch.arange(12.0).view(4, 3) + r for r in range(size)]
        x = xs[rank]
        for _ in range(2):
            assert comm.all_reduce(x.t()).tolist() == sum(xs).t().tolist()
        comm.gather(x.t(), 0)
        assert x.tolist() == xs[rank].tolist()
        return [f"{warning.filename.rpartition('/')[2]}: {warning.message}" for warning in caught]


def mismatches() -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Make calls that differ between ranks. Return what each rank is told."""
    found = []
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        x = torch.ones(2 * size)
        even = [2] * size
        more = [3 if (rank, r) == (0, 1) else 2 for r in range(size)]
        calls: list[Callable[[], Any]] = [
            lambda: comm.gather(x, 1 if rank == 1 else 0),
            lambda: comm.reduce(x, 0, reduction="max" if rank == 1 else "sum", algorithm="vendor"),
            lambda: comm.reduce(x, 0) if rank == 1 else comm.all_reduce(x),
            lambda: comm.all_to_all(torch.ones(sum(more)), input_sizes=more, output_sizes=even),
            lambda: comm.all_to_all(x, input_sizes=even, output_sizes=even) if rank == 1 else comm.all_to_all(x),
        ]
        for call in calls:
            with pytest.raises(shotcast.CollectiveMismatch) as caught:
                (call(), comm.barrier())  # a rank whose own call was done is told by the next one
            error = caught.value
            found.append((str(error), error.differing, error.fields))
            comm.reset()
    return found


def late_rank() -> list[tuple[tuple[int, ...], str]]:
    """Leave one rank out of each call. Return whom the others miss, and in what."""
    found = []
    with shotcast.Communicator(device="cpu", timeout_s=1) as comm:
        rank, size = comm.rank, comm.world_size
        x, even = torch.ones(2 * size), [2] * size
        for call in (
            lambda: comm.gather(x, 0),
            lambda: comm.scatter(x, 0),
            lambda: comm.reduce(x, 0),
            lambda: comm.all_to_all(x, input_sizes=even, output_sizes=even),
        ):
            if rank != size - 1:
                with pytest.raises(shotcast.CollectiveTimeout) as caught:
                    call()
                found.append((caught.value.missing, caught.value.op))
            comm.reset()
    return found


def killed_rank() -> list[tuple[str, str, tuple[int, ...], bool]]:
    """Kill the last rank, and make a call of each kind with it. Return what the others are told, and if soon."""
    first = shotcast.Communicator(device="cpu", timeout_s=300)
    comms = [first, *(comm for _ in range(4) if (comm := first.split(0)) is not None)]
    rank, size = first.rank, first.world_size
    x, even, y = torch.ones(2 * size), [2] * size, torch.empty(2 * size)
    first.barrier()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    calls: list[Callable[[shotcast.Communicator], Any]] = [
        lambda comm: comm.gather(x, 0),
        lambda comm: comm.scatter(x, size - 1),
        lambda comm: comm.start("reduce", x, 0).wait(),
        lambda comm: comm.all_to_all(x, input_sizes=even, output_sizes=even),
        lambda comm: comm.batch_send_recv([(x, size - 1)], [(y, size - 1)]),
    ]
    for comm, call in zip(comms, calls, strict=True):
        begun = time.monotonic()
        with pytest.raises(shotcast.CollectiveTimeout) as caught:
            call(comm)
        error = caught.value
        found.append((error.op, error.reason, error.missing, time.monotonic() - begun < 60))
        comm.close()
    return found


# -- batches, started and coalesced calls -----------------------------------------------------------------------------


def batches() -> int:
    """Send messages of any sizes between all ranks at once, several in a direction. Return how many came."""
    came = 0
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        others = [r for r in range(size) if r != rank]
        for seed, most in enumerate((1, 100, 40_000, 1_000_003)):
            numbers = random.Random(seed)
            counts = {(a, b): [numbers.randint(0, most) for _ in range(3)] for a in range(size) for b in range(size)}

            def message(a: int, b: int, k: int, count: int) -> torch.Tensor:
                return torch.arange(count, dtype=torch.int32) + 1000 * a + 100 * b + k

            sends = [(message(rank, r, k, n), r) for r in others for k, n in enumerate(counts[rank, r])]
            recvs = [(torch.empty(n, dtype=torch.int32), r) for r in others for n in counts[r, rank]]
            wanted = [message(r, rank, k, n) for r in others for k, n in enumerate(counts[r, rank])]
            numbers = random.Random(100 * seed + rank)
            by_peer, by_source = (sorted(range(len(others)), key=lambda _: numbers.random()) for _ in range(2))
            sends = [one for i in by_peer for one in sends[3 * i : 3 * i + 3]]
            recvs, wanted = ([one for i in by_source for one in each[3 * i : 3 * i + 3]] for each in (recvs, wanted))
            got = comm.batch_send_recv(sends, recvs)
            for one, expected in zip(got, wanted, strict=True):
                same_bits(one, expected, (seed, rank))
                came += 1
        x = torch.full((300_000,), float(rank))
        if rank == 0:  # ranks that only receive make their calls one by one
            y = torch.empty_like(x)
            comm.batch_send_recv([(x, r) for r in others for _ in range(2)], [(y, size - 1)])
            assert y[-1] == size - 1
        elif rank == size - 1:
            got = comm.batch_send_recv([(x, 0)], [(torch.empty_like(x), 0) for _ in range(2)])
            assert [one[-1] for one in got] == [0, 0]
        else:
            for _ in range(2):
                assert comm.recv(torch.empty_like(x), 0)[-1] == 0
    return came


def batch_faults() -> list[tuple[str, tuple[int, ...]]]:
    """Leave a rank out of a batch, and send it what it does not expect. Return what the ranks are told."""
    found: list[tuple[str, tuple[int, ...]]] = []
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        rank = comm.rank
        x, y = torch.ones(8), torch.empty(8)
        if rank == 0:
            comm.set_timeout(0.4)
            with pytest.raises(shotcast.CollectiveTimeout) as late:
                comm.batch_send_recv([(x, 1)], [(y, 1), (y, 2)])
            found.append((late.value.op, late.value.missing))
            assert y.isnan().all()
            comm.set_timeout(60)
        comm.reset()
        if rank < 2:
            with pytest.raises(shotcast.CollectiveMismatch) as wrong:
                (comm.batch_send_recv([(x[: 4 + rank], 1 - rank)], [(y[:4], 1 - rank)]), comm.barrier())
            found.append((wrong.value.calls.get(1, ""), wrong.value.differing))
        comm.reset()
        assert "exchanges no messages with itself" in refused(lambda: comm.batch_send_recv([(x, rank)]))
        assert comm.batch_send_recv() == []
    return found


def started() -> None:
    """Start calls, and make others before they are waited for."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        total = float(sum(range(size)))
        x = torch.full((50_000,), float(rank))
        for _ in range(20):
            out = torch.empty_like(x)
            handles = [comm.start("all_reduce", x, out=out) for _ in range(3)]
            assert comm.all_reduce(x, out=torch.empty_like(x))[0] == total, "after those before it"
            assert all(handle.is_completed() for handle in handles)
            assert handles[0].wait() is out
            assert out[-1] == total
        handles = [comm.start("broadcast", torch.full((3,), float(rank)), root) for root in range(size)]
        assert [handle.wait()[0].item() for handle in handles] == list(range(size))
        y = torch.ones(4, requires_grad=True)
        comm.start("all_reduce", y * rank).wait().sum().backward()
        assert y.grad is not None
        assert y.grad.tolist() == [float(rank * size)] * 4
        assert "no call 'explain' can be started" in refused(lambda: comm.start("explain", x))
        assert "divided among" in refused(lambda: comm.start("reduce_scatter", torch.ones(size + 1)).wait())
        last = comm.start("barrier")
        comm.reset()
        assert last.is_completed()
        last = comm.start("all_reduce", x)
    assert last.wait()[0] == total, "close waits for it"
    assert "closed" in refused(lambda: comm.start("barrier"), shotcast.ClosedError)


def started_without_a_rank() -> tuple[bool, tuple[int, ...]]:
    """Start a call that a rank does not join. Return whether it was over after the start, and whom its end misses."""
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        x = torch.ones(8)
        comm.barrier()
        if comm.rank == 0:
            comm._host.barrier()
            return False, ()
        comm.set_timeout(2)
        handle = comm.start("all_reduce", x)
        over = handle.is_completed()
        with pytest.raises(shotcast.CollectiveTimeout) as caught:
            handle.wait()
        comm._host.barrier()
        return over, caught.value.missing


def coalesced() -> None:
    """Compare coalesced calls with those one by one, bit by bit."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        shapes = [(3,), (2, 5), (), (0,), (7, 1, 2)]
        kinds = [torch.float32, torch.bfloat16, torch.float32, torch.int64, torch.float32]
        xs = [patterns(math.prod(shape), d, rank).view(shape) for shape, d in zip(shapes, kinds, strict=True)]
        xs = [x.nan_to_num(1.0) if x.is_floating_point() else x for x in xs]
        for got, x in zip(comm.all_reduce_coalesced(xs), xs, strict=True):
            same_bits(got, comm.all_reduce(x), "all_reduce")
        for got, x in zip(comm.all_gather_coalesced(xs), xs, strict=True):
            same_bits(got, comm.all_gather(x), "all_gather")
        rows = [torch.cat([x.reshape(1, -1)] * size) for x in xs]
        for got, x in zip(comm.reduce_scatter_coalesced(rows), rows, strict=True):
            same_bits(got, comm.reduce_scatter(x), "reduce_scatter")
        ys = [x.clone() for x in xs]
        assert all(a is b for a, b in zip(comm.all_reduce_coalesced(ys, ys), ys, strict=True))
        same_bits(ys[1], comm.all_reduce(xs[1]), "in place")
        y = torch.ones(3, requires_grad=True)
        sum(part.sum() for part in comm.all_reduce_coalesced([y, 2 * y])).backward()
        assert y.grad is not None
        assert y.grad.tolist() == [3.0 * size] * 3
        assert "as many outs" in refused(lambda: comm.all_reduce_coalesced(xs, xs[1:]))
        assert "as many outs" in refused(lambda: comm.all_reduce_coalesced(xs[0]))
        assert comm.all_reduce_coalesced([]) == []
        lists = [[torch.full((a + 1, b), 10.0 * a + b) for b in range(size)] for a in range(size)]
        outs = [torch.empty(a + 1, rank) for a in range(size)]
        assert all(one is out for one, out in zip(comm.all_to_all_list(lists[rank], outs), outs, strict=True))
        for a, out in enumerate(outs):
            same_bits(out, lists[a][rank], ("all_to_all_list", a))
        assert f"two lists of {size} tensors" in refused(lambda: comm.all_to_all_list(xs, xs[:1]))
        mixed = [out.int() for out in outs]
        assert "of one dtype" in refused(lambda: comm.all_to_all_list(lists[rank], mixed))


# -- derivatives and torch.compile ------------------------------------------------------------------------------------


def rooted_program(comm: shotcast.Communicator, x: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on ``x`` through every call that has a derivative."""
    rank, size = comm.rank, comm.world_size
    scale = torch.arange(1.0, 1.0 + x.numel()).view(x.shape)
    found = comm.reduce(x * 2, 0) * (scale if rank == 0 else 1)
    largest = comm.reduce(x, size - 1, reduction="max")
    mean = comm.reduce(x, 0, reduction="avg")
    parts = comm.gather(x * x, size - 1)
    own = comm.scatter(x * scale, 0)
    sent = [(rank + peer) % 3 for peer in range(size)]  # as many as come from each
    turned = comm.all_to_all(x[: sum(sent)] * (rank + 1), input_sizes=sent, output_sizes=sent)
    joined = comm.all_reduce_coalesced([x, own])
    started = comm.start("all_gather", own * 3).wait()
    others = [peer for peer in range(size) if peer != rank]
    came = comm.batch_send_recv([(x.detach(), p) for p in others], [(torch.empty_like(x), p) for p in others])
    numbers = [found, largest, mean, parts * parts, own, turned * turned, *joined, started, *came]
    return sum((part * (i + 1)).sum() for i, part in enumerate(numbers))  # type: ignore[return-value]


def plain_program(xs: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the numbers of all ranks, by plain PyTorch."""
    size = len(xs)
    scale = torch.arange(1.0, 1.0 + xs[0].numel()).view(xs[0].shape)
    own = (xs[0] * scale).chunk(size)
    total: Any = 0.0
    for rank, x in enumerate(xs):
        numbers = []
        numbers.append(sum(xs) * 2 * scale if rank == 0 else x[:0])
        numbers.append(torch.stack(xs).amax(0) if rank == size - 1 else x[:0])
        numbers.append(torch.stack(xs).mean(0) if rank == 0 else x[:0])
        numbers.append(torch.cat([one * one for one in xs]) ** 2 if rank == size - 1 else x[:0])
        numbers.append(own[rank])
        sizes = [[(r + peer) % 3 for peer in range(size)] for r in range(size)]
        came = [(one[: sum(s)] * (r + 1)).split(s)[rank] for r, (one, s) in enumerate(zip(xs, sizes, strict=True))]
        numbers.append(torch.cat(came) ** 2)
        numbers += [sum(xs), sum(own), torch.cat(own) * 3]
        numbers += [one.detach() for r, one in enumerate(xs) if r != rank]
        total = total + sum((part * (i + 1)).sum() for i, part in enumerate(numbers))
    return total


def derivatives() -> list[tuple[float, float]]:
    """Compare numbers and gradients with plain PyTorch, eagerly and compiled. Return them."""
    torch._dynamo.reset()
    found = []
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        generator = torch.Generator().manual_seed(3)
        xs = [torch.rand(2 * size, 3, generator=generator).requires_grad_() for _ in range(size)]
        wanted = torch.autograd.grad(plain_program(xs), xs)[rank]
        compiled = torch.compile(rooted_program, backend="aot_eager", fullgraph=True, dynamic=False)
        for program in (rooted_program, compiled):
            x = xs[rank].detach().clone().requires_grad_()
            number = program(comm, x)
            number.backward()
            assert x.grad is not None
            torch.testing.assert_close(x.grad, wanted, rtol=1e-5, atol=1e-5)
            found.append((number.item(), x.grad.sum().item()))
        y = xs[rank].detach().clone().requires_grad_()
        out = torch.zeros(2 * size * size, 3) if rank == 0 else None
        (comm.gather(y, 0, out=out) * 2).sum().backward()
        assert torch.equal(y.grad, torch.full_like(y, 2.0)), "into out"  # type: ignore[arg-type]
    return found


# -- graphs -----------------------------------------------------------------------------------------------------------


def captured() -> None:
    """Replay a graph of calls with a root, a started call and coalesced ones, with other values each time."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        x = torch.zeros(512 * size, 8, device=comm.device)
        parts = torch.empty(512 * size * size, 8, device=comm.device) if rank == 0 else None
        own = torch.empty(512, 8, device=comm.device)

        def calls() -> list[torch.Tensor]:
            handle = comm.start("all_reduce", x)
            found = [comm.gather(x, 0, out=parts), comm.scatter(x, size - 1, out=own), comm.reduce(x, 0)]
            found += comm.all_reduce_coalesced([x[0], x[1, :3]])
            return [*found, handle.wait()]

        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = calls()
        for turn in range(20):
            xs = [torch.full_like(x, float(turn + r)) for r in range(size)]
            x.copy_(xs[rank])
            graph.replay()
            torch.cuda.synchronize()
            comm.check()
            total = sum(xs)
            wanted = [torch.cat(xs) if rank == 0 else x[:0], xs[-1][:512], total if rank == 0 else x[:0]]
            wanted += [total[0], total[1, :3], total]
            for number, (got, one) in enumerate(zip(found, wanted, strict=True)):
                assert torch.equal(got, one), (turn, number)
