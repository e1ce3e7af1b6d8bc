"""Functions that the ranks of the tests of uneven all_to_all by kernels of GPUs run."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from communicator_targets import patterns, same_bits
from operation_targets import matrix_of
from workers import settle, shifted

import shotcast
from shotcast.transport.cpu.executor import CpuBoundCall
from shotcast.transport.cpu.waiting import DONE
from shotcast.wire import Op

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int16, torch.float64)


def exchanges(device: str, max_bytes: int, mosts: tuple[int, ...], shift: int) -> int:
    """Exchange parts of random sizes, with zeros, between other calls, bit by bit. Return the number of calls."""
    done = 0
    with shotcast.Communicator(device=device, max_bytes=max_bytes, timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        assert comm.candidates(torch.ones(8, device=device), "all_to_all_uneven")[0] == "one_shot"
        for number, (most, dtype) in enumerate(itertools.product(mosts, DTYPES)):
            rows = matrix_of(size, number, most)
            if number % 3 == 1:  # one rank sends much, and only to the next one
                rows = [[most * (j == (i + 1) % size and i == number % size) for j in range(size)] for i in range(size)]
            width = (1, 3, 16)[number % 3]
            xs = [patterns(sum(rows[r]) * width, dtype, 100 * number + r).view(-1, width) for r in range(size)]
            x = shifted(xs[rank].to(device).view(-1), shift).view(-1, width)
            sizes = {"input_sizes": rows[rank], "output_sizes": [row[rank] for row in rows]}
            got = comm.all_to_all(x, algorithm="one_shot", **sizes)
            settle(comm)
            wanted = torch.cat([xs[r].split(rows[r])[rank] for r in range(size)])
            same_bits(got.cpu(), wanted, (number, most, dtype, rows))
            if number % 2:
                total = comm.all_reduce(torch.ones(5 + number, device=device), algorithm="one_shot")
                assert set(total.tolist()) == {float(size)}
            done += 1
        comm.check()
    return done


def _to_the_end(comm: shotcast.Communicator, sent: list[int], received: list[int]) -> None:
    """Make a call, and another one: a rank whose own call was done is told by that."""
    x = torch.ones(sum(sent), device=comm.device)
    comm.all_to_all(x, input_sizes=sent, output_sizes=received, algorithm="one_shot")
    settle(comm)
    comm.barrier()
    settle(comm)


def differing_sizes(device: str) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Send another size than is expected: more or less, of a head or of chunks. Return what the rank is told."""
    found = []
    with shotcast.Communicator(device=device, max_bytes=1 << 14, timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        for even, sent in ((2, 3), (3, 2), (9_000, 2), (2, 9_000)):
            mine = [sent if (rank, r) == (0, 1) else even for r in range(size)]
            with pytest.raises(shotcast.CollectiveMismatch) as caught:
                _to_the_end(comm, mine, [even] * size)
            error = caught.value
            found.append((str(error), error.differing, error.fields))
            comm.reset()
        x = torch.arange(2.0 * size, device=device)
        got = comm.all_to_all(x, input_sizes=[2] * size, output_sizes=[2] * size, algorithm="one_shot")
        assert got.tolist() == [2.0 * rank, 2.0 * rank + 1] * size, "calls go on after a reset"
    return found


def _sizes(rank: int, size: int, number: int) -> dict[str, list[int]]:
    """Return sizes of a call that no call of another number has, for 2 ranks and more."""
    rows = [[number + (i * size + j) % 3 for j in range(size)] for i in range(size)]
    return {"input_sizes": rows[rank], "output_sizes": [row[rank] for row in rows]}


def many_sizes(algorithm: str, count: int) -> tuple[int, list[float]]:
    """Exchange parts of sizes that no call before had. Return how many calls are remembered, and times.

    The times are those of calls of the same sizes and of others without the exchange, the least of several runs of
    ``count`` each; of native kernels alone.
    """
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        x = torch.arange(60_000.0) + 100_000 * rank
        for number in (0, 1, 3, 900, 2, 0, 5000):
            sizes = _sizes(rank, size, number)
            got = comm.all_to_all(x[: sum(sizes["input_sizes"])], algorithm=algorithm, **sizes)
            wanted, before = [], [sum(_sizes(r, size, number)["input_sizes"][:rank]) for r in range(size)]
            for r, (start, part) in enumerate(zip(before, sizes["output_sizes"], strict=True)):
                wanted.append(torch.arange(float(part)) + start + 100_000 * r)
            assert torch.equal(got, torch.cat(wanted)), (number, got)

        made = next(call.bound for call in comm._calls.values() if call.plan.op is Op.ALL_TO_ALL_UNEVEN)
        if not (isinstance(made, CpuBoundCall) and algorithm == "one_shot"):
            return len(comm._calls), []
        made._function = lambda *_: DONE

        def run(numbers: range | list[int]) -> float:
            given = [_sizes(rank, size, number) for number in numbers]
            xs = [x[: sum(sizes["input_sizes"])] for sizes in given]
            begun = time.thread_time()
            for part, sizes in zip(xs, given, strict=True):
                comm.all_to_all(part, algorithm=algorithm, **sizes)
            return time.thread_time() - begun

        times = [
            min(run([100 + 5 * count // 2] * count) for _ in range(5)),
            min(run(range(100 + turn * count, 100 + (turn + 1) * count)) for turn in range(5)),
        ]
        return len(comm._calls), times


def host_times() -> tuple[int, list[float]]:
    """Return how many calls are remembered, and the times of the host for sizes of calls before and for new ones."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        x = torch.ones(20_000, device=comm.device)
        out = torch.empty_like(x)

        def run(numbers: range | list[int]) -> float:
            given = [_sizes(rank, size, number) for number in numbers]
            parts = [(x[: sum(each["input_sizes"])], out[: sum(each["output_sizes"])]) for each in given]
            comm.barrier()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for (part, into), sizes in zip(parts, given, strict=True):
                comm.all_to_all(part, out=into, **sizes)
            took = time.perf_counter() - begun
            torch.cuda.synchronize()
            return took

        run([20, 21, 22, 23, 24])
        times = [min(run([20] * 200) for _ in range(5)), min(run(range(n, n + 200)) for n in range(100, 1100, 200))]
        comm.check()
        return len(comm._calls), times


def captured(most: int) -> None:
    """Capture an exchange in a graph, and replay it with other values between eager ones of other sizes."""
    with shotcast.Communicator(device="cuda", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        for seed in range(4):
            rows = matrix_of(size, seed, most)
            sizes = {"input_sizes": rows[rank], "output_sizes": [row[rank] for row in rows]}
            x = torch.zeros(sum(rows[rank]), device="cuda")
            out = torch.empty(sum(sizes["output_sizes"]), device="cuda")
            comm.all_to_all(x, out=out, algorithm="one_shot", **sizes)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                comm.all_to_all(x, out=out, algorithm="one_shot", **sizes)
            for turn in range(5):
                x.copy_(torch.arange(x.numel(), device="cuda") + 1000.0 * rank + turn)
                graph.replay()
                between = comm.all_to_all(x, algorithm="one_shot", **sizes)
                torch.cuda.synchronize()
                assert torch.equal(out, between)
                if sizes["output_sizes"][0]:
                    assert out[0].item() == sum(rows[0][:rank]) + turn
            comm.check()
