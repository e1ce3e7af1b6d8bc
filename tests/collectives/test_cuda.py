"""The Communicator on real GPUs: every pair, four, or as many as there are. Run with ``pytest -m gpu``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import expected_results
import pytest
import torch
from resource_targets import many_splits, one_full_gpu, replays_across_growth
from workers import (
    FLOATS,
    SIGNALS,
    across_epochs,
    changing_sizes,
    check,
    differing,
    inputs,
    killed,
    late_then_reset,
    matrix,
    mismatched,
    numerics,
    tame,
    waiting_messages,
)

import shotcast
from shotcast.collectives import reference
from shotcast.collectives.rank_device import enough_gpus
from shotcast.transport.triton.layout import WorkspaceLayout, bytes_of_copies

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 3, 4, 8) if enough_gpus(n)]
COUNTS = [0, 1, 2, 3, 5, 8, 63, 64, 1000, 4096, 4099, 65536, 100_003, 1 << 20, 3_000_001]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_matrix(world_size: int, shift: int) -> None:
    done = shotcast.spawn(matrix, world_size, "cuda", list(FLOATS), COUNTS, shift, 32 << 20, timeout_s=380)
    assert min(done) == max(done) > 500


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ten_thousand_calls_of_changing_size_with_stragglers(world_size: int) -> None:
    shotcast.spawn(changing_sizes, world_size, "cuda", 10_000, 300_000, 3, timeout_s=380)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_closing_releases_everything(count: int) -> None:
    """A communicator of NCCL takes memory, threads and files; a workspace that is not given back takes memory."""
    for early, late in shotcast.spawn(many_splits, 2, "cuda", count, 10, timeout_s=100 + count):
        assert late.files <= early.files, (early, late)
        assert late.threads <= early.threads + 2, (early, late)  # libraries start some once
        assert late.groups <= early.groups
        assert late.symmetric == early.symmetric
        assert late.gpu_mib - early.gpu_mib < 64
        assert late.memory_kib - early.memory_kib < 20_000 + 40 * count


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_go_on_in_the_workspace_that_they_were_captured_with(world_size: int) -> None:
    mib = 1 << 20
    sizes = [8192, 16 * mib, 64 * mib]
    sizes_of = [(room * mib, room == 8) for room in (8, 32, 64)]
    engine_bytes = bytes_of_copies(exclusive=False)
    regions = [WorkspaceLayout.for_messages(room, first, engine_bytes=engine_bytes).nbytes for room, first in sizes_of]
    wanted = list(itertools.accumulate(regions))
    assert shotcast.spawn(replays_across_growth, world_size, sizes, timeout_s=200) == [wanted] * world_size


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_one_full_gpu_is_an_error_of_all_ranks() -> None:
    for errors in shotcast.spawn(one_full_gpu, 2, 1, timeout_s=200):
        assert len(errors) == 3
        for error in errors:
            assert "rank 1: cuda:1 cannot hold" in error
            assert "are free" in error


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_messages_wait_in_the_mailbox(world_size: int) -> None:
    done = shotcast.spawn(waiting_messages, world_size, "cuda", 50, timeout_s=100)
    assert [arrived > 500 for arrived in done] == [rank ^ 1 < world_size for rank in range(world_size)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_epochs_across_borders(world_size: int) -> None:
    assert shotcast.spawn(across_epochs, world_size, "cuda", timeout_s=200)[0][2] > 1 << 32


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_numerics(world_size: int) -> None:
    results = shotcast.spawn(numerics, world_size, "cuda", timeout_s=200)
    assert all(result == results[0] for result in results)


def graphs(replays: int) -> None:
    """Replay graphs of several calls on changed inputs, between eager calls."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        shared, own = random.Random(1), random.Random(comm.rank)
        captured = []
        for count in (512, 4096, 70_001, 1 << 20):
            for name in ("one_shot", "two_shot", "two_shot_fp8", "ring"):
                x = torch.zeros(count, dtype=torch.bfloat16, device=comm.device)
                out = torch.empty_like(x)
                gathered = torch.empty(count * comm.world_size, dtype=torch.int16, device=comm.device)
                comm.all_reduce(x, out=out, algorithm=name)
                comm.all_gather(x.view(torch.int16), out=gathered)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(3):
                        comm.all_reduce(x, out=out, algorithm=name)
                    comm.all_gather(x.view(torch.int16), out=gathered)
                captured.append((name, x, out, gathered, graph))
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for replay in range(replays):
            name, x, out, gathered, graph = shared.choice(captured)
            xs = inputs(x.numel(), torch.bfloat16, comm.world_size, replay, comm.device)
            xs = tame(xs) if name == "two_shot_fp8" else xs
            x.copy_(xs[comm.rank])
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(300_000))
            graph.replay()
            wrong += differing(out, expected_results.all_reduce(xs, name))
            wrong += differing(gathered, torch.cat(xs).view(torch.int16))
            if shared.random() < 0.5:
                check(comm.all_reduce(xs[comm.rank], algorithm=name), expected_results.all_reduce(xs, name), "between")
        assert int(wrong) == 0
        comm.check()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_replay_on_changed_inputs(world_size: int) -> None:
    shotcast.spawn(graphs, world_size, 200, timeout_s=300)


def two_streams(calls: int) -> None:
    """Alternate calls between streams, which the communicator alone orders; also use two streams inside one capture."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        own, shared = random.Random(comm.rank), random.Random(9)
        streams = [torch.cuda.Stream(comm.device), torch.cuda.Stream(comm.device)]
        xs = inputs(20_000, torch.float16, comm.world_size, 8, comm.device)
        torch.cuda.synchronize()
        results = []
        for _ in range(calls):
            with torch.cuda.stream(shared.choice(streams)):
                if own.random() < 0.2:
                    torch.cuda._sleep(own.randrange(200_000))
                name = shared.choice(["one_shot", "two_shot", "ring"])
                count = shared.randrange(1, 20_000)
                results.append((count, name, comm.all_reduce(xs[comm.rank][:count].clone(), algorithm=name)))
        torch.cuda.synchronize()
        for count, name, got in results:
            check(got, expected_results.all_reduce([x[:count] for x in xs], name), (count, name))
        first, second = torch.empty_like(xs[0]), torch.empty_like(xs[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            streams[0].wait_stream(main)
            with torch.cuda.stream(streams[0]):
                comm.all_reduce(xs[comm.rank], out=first, algorithm="two_shot")
            comm.all_reduce(xs[comm.rank], out=second, algorithm="one_shot")
            main.wait_stream(streams[0])
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        wanted = reference.ordered_sum(xs)
        check(first, wanted, "captured")
        check(second, wanted, "captured")
        comm.check()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_two_streams(world_size: int) -> None:
    shotcast.spawn(two_streams, world_size, 300, timeout_s=200)


def eager_around_a_capture(device: str) -> None:
    """Make an eager call late on one stream, capture on a second, and make an eager call on a third."""
    with shotcast.Communicator(device=device, timeout_s=60) as comm:
        streams = [torch.cuda.Stream(comm.device) for _ in range(3)]
        x, small = torch.ones(1 << 20, device=comm.device), torch.ones(2048, device=comm.device)
        comm.all_reduce(x)
        comm.all_reduce(small)
        captured = torch.zeros_like(small)
        for _ in range(10):
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(50_000_000)
                first = comm.all_reduce(x)
                done = torch.cuda.Event()
                done.record()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(streams[1]):
                graph.capture_begin(capture_error_mode="thread_local")
                comm.all_reduce(small, out=captured)
                graph.capture_end()
            with torch.cuda.stream(streams[2]):
                second = comm.all_reduce(small)
                torch.cuda.current_stream().synchronize()
                assert done.query(), "the third call did not wait for the first"
            graph.replay()
            torch.cuda.synchronize()
            for got in (first, second, captured):
                assert bool((got == comm.world_size).all())
        comm.check()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_eager_calls_around_a_capture(world_size: int) -> None:
    shotcast.spawn(eager_around_a_capture, world_size, "cuda", timeout_s=200)


def written(device: str) -> None:
    """Check versions and gradients of what repeated calls write, prepared ones and others."""
    with shotcast.Communicator(device=device, timeout_s=60) as comm:
        factor = torch.ones(2048, device=comm.device, requires_grad=True)
        for _ in range(3):
            y = torch.ones(2048, device=comm.device)
            product, before = (y * factor).sum(), y._version
            comm.all_reduce(y, out=y)
            assert y._version > before
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
                comm.all_reduce(factor, out=factor)
            y = factor * (comm.rank + 1)
            comm.all_reduce(y, out=y)
            (grad,) = torch.autograd.grad(y.sum(), factor)
            assert grad.tolist() == [comm.world_size * (comm.rank + 1.0)] * 2048
            with torch.no_grad():
                comm.broadcast(factor, 0)
        comm.check()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_written_tensors_and_autograd(world_size: int) -> None:
    shotcast.spawn(written, world_size, "cuda", timeout_s=200)


def repeated(calls: int) -> int:
    """Repeat the same calls, as eager decoding makes them. Return how many of them were prepared."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        prepared, find = [0], comm._prepared.find

        def counted(*given: Any) -> Any:
            found = find(*given)
            prepared[0] += found is not None
            return found

        comm._prepared.find = counted  # type: ignore[method-assign]
        other = torch.cuda.Stream(device)
        for number in range(calls):
            count, dtype = (24, 4096, 40_000, 3_000_001)[number % 4], list(FLOATS.values())[number % 3]
            mine = torch.arange(count + 1, device=device) % 7
            x = (mine * (rank + 1)).to(dtype)[number // 48 % 2 :][:count]  # aligned and unaligned in turn
            out = x if number // 12 % 2 else torch.empty_like(x)
            wanted = (mine * (size * (size + 1) // 2)).to(dtype)[number // 48 % 2 :][:count]
            algorithm = ("one_shot", "two_shot", "auto")[number // 4 % 3]
            with torch.cuda.stream(other if number % 5 == 0 else torch.cuda.current_stream(device)):
                torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
                assert comm.all_reduce(x, out=out, algorithm=algorithm) is out
            torch.cuda.synchronize(device)
            assert torch.equal(out, wanted), (number, count, dtype, algorithm)
        comm.check()
        return prepared[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_repeated_calls_are_prepared(world_size: int) -> None:
    assert min(shotcast.spawn(repeated, world_size, 400, timeout_s=200)) > 200


def expect_timeout(outcome: dict[str, Any], missing: int, timeout_s: float, reason: str = "late") -> None:
    error = outcome["error"]
    assert isinstance(error, shotcast.CollectiveTimeout), error
    assert (error.missing, error.reason) == ((missing,), reason)
    assert error.op == "all_reduce"
    assert error.epoch > 2
    if reason == "late":
        assert timeout_s * 0.9 < outcome["took"] < timeout_s + 1
    else:
        assert outcome["took"] < 1, "a dead rank is not waited for"
    assert outcome["nan"]


@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_killed_or_stopped_rank(world_size: int, fault: str, record_property: Callable[[str, object], None]) -> None:
    victim, timeout_s = world_size - 1, 600.0 if fault == "killed" else 2.0
    results = shotcast.spawn(
        killed, world_size, "cuda", "two_shot", victim, SIGNALS[fault], timeout_s, timeout_s=25, return_exceptions=True
    )
    for rank in range(world_size):
        if rank == victim:
            assert isinstance(results[rank], shotcast.RankFailed)
            continue
        assert isinstance(results[rank], dict), results[rank]
        record_property(f"rank_{rank}", f"{results[rank]['took']:.3f} s: {results[rank]['error']}")
        expect_timeout(results[rank], victim, timeout_s, "dead" if fault == "killed" else "late")
        assert isinstance(results[rank]["again"], shotcast.CollectiveTimeout)
        assert results[rank]["again_s"] < 0.5
        assert results[rank]["left"] == []


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "two_shot_fp8", "ring"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reset_after_a_late_rank(
    world_size: int, algorithm: str, record_property: Callable[[str, object], None]
) -> None:
    results = shotcast.spawn(late_then_reset, world_size, "cuda", algorithm, 1, 2.0, timeout_s=60)
    for rank, outcome in enumerate(results):
        record_property(f"rank_{rank}", f"{outcome['took']:.3f} s: {outcome['error']}")
        if rank == 1:
            assert outcome["error"].missing == (1,)
        else:
            expect_timeout(outcome, 1, 2.0)


@pytest.mark.parametrize("what", ["op", "nbytes", "nbytes of two calls", "dtype", "algorithm", "root", "launch"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_mismatch(world_size: int, what: str, record_property: Callable[[str, object], None]) -> None:
    odd = world_size - 1
    for rank, outcome in enumerate(shotcast.spawn(mismatched, world_size, "cuda", what, odd, 5.0, timeout_s=60)):
        record_property(f"rank_{rank}", f"{outcome['took']:.3f} s: {outcome['error']}")
        error = outcome["error"]
        assert isinstance(error, shotcast.CollectiveMismatch), error
        assert error.differing == (odd,)
        assert error.fields == (what.split()[0],)
        assert outcome["took"] < 2
