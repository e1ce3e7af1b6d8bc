"""Ranks of the tests of gathered products, in the interpreter, on CPU ranks and on GPUs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import shotcast
from shotcast.kernels.triton.gemm import GemmConfig
from shotcast.overlap import adaptive, gathered_products
from shotcast.overlap.gathered_products import all_gather_matmul, uses_own_product
from shotcast.overlap.products import ShapedProduct

SMALL = GemmConfig(16, 32, 32, 2, 4, group=2)


@dataclass(frozen=True)
class Case:
    """A gathered product: the rows of a rank, their length, the columns of each weight, and how it is launched."""

    rows: int
    depth: int
    columns: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    config: GemmConfig | None = None
    sms: int | None = None
    by_columns: bool = True


def operands(case: Case, world_size: int, seed: int, device: torch.device) -> tuple[list[Any], list[Any]]:
    """Return the rows of every rank, and the weights, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) + 0.25).to(case.dtype).to(device)

    shards = [matrix(case.rows, case.depth) for _ in range(world_size)]
    if case.by_columns:
        return shards, [matrix(one, case.depth).t() for one in case.columns]
    return shards, [matrix(case.depth, one) for one in case.columns]


def plain(comm: shotcast.Communicator, shard: torch.Tensor, weight: torch.Tensor, case: Case) -> torch.Tensor:
    """Gather and multiply by the calls that everybody knows."""
    gathered = comm.all_gather(shard)
    if uses_own_product(gathered):
        return ShapedProduct(case.config)(gathered, weight)
    return torch.cat([torch.mm(part, weight) for part in gathered.tensor_split(comm.world_size)])


def wrong_products(cases: Sequence[Case], ways: Sequence[str], device: str = "cpu", seed: int = 0) -> list[str]:
    """Return what is wrong with products of each way: other bits than the plain calls, or too far from float64."""
    torch.set_num_threads(1)
    wrong = []
    with shotcast.Communicator(device=device, max_bytes=8 << 20, timeout_s=100) as comm:
        lanes = shotcast.overlap.lanes_of(comm)
        for number, case in enumerate(cases):
            shards, weights = operands(case, comm.world_size, seed + number, comm.device)
            rows, whole = shards[comm.rank], torch.cat(shards)
            expected = [plain(comm, rows, weight, case) for weight in weights]
            for way in ways if uses_own_product(rows) else [one for one in ways if one != "fused"]:
                done = all_gather_matmul(
                    lanes, rows, weights, return_gathered=True, way=way, config=case.config, sms=case.sms
                )
                assert done.gathered is not None
                if not torch.equal(done.gathered, whole):
                    wrong.append(f"{case}, {way}: the gathered rows")
                for weight, product, bits in zip(weights, done.products, expected, strict=True):
                    if not torch.equal(product, bits):
                        wrong.append(f"{case}, {way}: other bits")
                    exact, size = whole.double() @ weight.double(), whole.double().abs() @ weight.double().abs()
                    bound = size * (case.depth * 2**-23) + exact.abs() * torch.finfo(case.dtype).eps + 1e-7
                    if not bool(((product.double() - exact).abs() <= bound).all()):
                        wrong.append(f"{case}, {way}: values")
            if comm.rank == number % comm.world_size:
                time.sleep(0.003)
            comm.all_reduce(torch.ones(5, device=comm.device))
        lanes.close()
        comm.check()
    return wrong


def _changed_wait(wait: Any, change: str) -> Any:
    def changed(arrivals: Any, chunks: Any, workers: Any, tma: Any) -> None:
        if change == "a chunk less":
            wait(arrivals, chunks - 1, workers, tma)

    return changed if change else wait


def arriving_rows(config: GemmConfig, rows: int, change: str = "") -> tuple[bool, bool]:
    """Multiply rows of two ranks that a thread brings, a chunk of both whenever the kernel has found one missing.

    Return whether the product is right, and whether all words are zero again. A wait that ends too early meets NaN.
    """
    from shotcast.kernels.triton import arriving_gemm, gemm

    world_size, workers, depth, columns = 2, 3, 32, 40
    generator = torch.Generator().manual_seed(rows)
    whole = torch.randn(world_size * rows, depth, generator=generator).bfloat16()
    weight = torch.randn(columns, depth, generator=generator).bfloat16().t()
    wanted = torch.empty(len(whole), columns, dtype=torch.bfloat16)
    gemm.Gemm(gemm.form_of(whole, weight, wanted), config, 1)(whole, weight, wanted)
    arrived = torch.full_like(whole, float("nan"))
    out = torch.full_like(wanted, float("nan"))
    words = torch.zeros(arriving_gemm.MOST_WORDS + 1, dtype=torch.int64)
    chunk_rows = 3
    arrival = arriving_gemm.Arrival(1, world_size, workers, chunk_rows * depth * 2)
    product = arriving_gemm.ArrivingGemm(gemm.form_of(arrived, weight, out), config, 2, arrival)
    missed, over = threading.Event(), threading.Event()

    looks = 0

    def look_again() -> None:
        nonlocal looks
        missed.set()
        time.sleep(0.0002)
        looks = 0 if thread.is_alive() else looks + 1
        assert looks < 100, "the product waits for what has come"

    def bring() -> None:
        for number, first in enumerate(range(0, rows, chunk_rows)):
            while not missed.wait(0.01):
                if over.is_set():
                    return
            missed.clear()
            for start in range(0, len(whole), rows):
                part = slice(start + first, start + min(first + chunk_rows, rows))
                arrived[part] = whole[part]
            words[number % workers] += 1

    arriving_gemm.yield_core = look_again
    arriving_gemm.await_chunks = _changed_wait(arriving_gemm.await_chunks, change)
    thread = threading.Thread(target=bring)
    thread.start()
    try:
        product.multiply(0, arrived, weight, out, words.data_ptr())
    finally:
        over.set()
        thread.join()
    return torch.equal(out, wanted), not words.any()


def arriving_cases(changes: Sequence[str]) -> dict[str, list[tuple[bool, bool]]]:
    """Multiply arriving rows in several shapes, with each change of the wait."""
    from shotcast.kernels.triton import arriving_gemm

    persistent = GemmConfig(16, 32, 16, 2, 4, group=1, persistent=True)
    wait = arriving_gemm.await_chunks
    found: dict[str, list[tuple[bool, bool]]] = {}
    for change in changes:
        found[change] = []
        for config, rows in ((SMALL, 32), (SMALL, 20), (persistent, 48)):
            arriving_gemm.await_chunks = wait
            found[change].append(arriving_rows(config, rows, change))
    return found


def early_announcements(ahead: int) -> int:
    """Gather rows, and count the announcements that come before the chunks ``ahead`` of them are in place."""
    from shotcast.kernels.triton.arriving_gemm import ArrivingGemm
    from shotcast.transport.triton import few_sms

    def failing(*args: Any) -> None:
        raise KeyError

    early = steps = 0
    tell, state = few_sms.announce, {}

    def look(arrivals: Any, worker: Any, chunks: Any, warps: Any) -> None:
        nonlocal early, steps
        whole, out, shape = state["whole"], state["out"], state["shape"]
        count, each = len(whole) // 2, shape.chunk_bytes // 2
        number, done = int(worker.handle.data[0]), int(getattr(chunks, "value", chunks)) + ahead
        for start in range(number * each, (number + done * shape.programs) * each, shape.programs * each):
            for first in (0, count):
                part = slice(first + start, first + min(start + each, count))
                early += not torch.equal(out[part], whole[part])
                steps += 1
        tell(arrivals, worker, chunks, warps)

    few_sms.announce = look
    with shotcast.Communicator(device="cpu", max_bytes=8 << 20, timeout_s=100) as comm:
        for rows in (5, 100, 2000):
            shards = [torch.full((rows, 16), float(rank + 1)).bfloat16() for rank in range(comm.world_size)]
            state["whole"], state["out"] = torch.cat(shards).view(-1), torch.full((32 * rows,), torch.nan).bfloat16()
            state["shape"] = comm.explain(state["out"], "all_gather", "few_sms", sms=4).launch
            gathered = state["out"].view(2 * rows, 16)
            weight = torch.eye(16).bfloat16()
            out = torch.empty_like(gathered)
            gathered_products._fused(comm, shards[comm.rank], gathered, [weight], [out], SMALL, 4)
            assert torch.equal(out.view(-1), state["whole"])
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyError):
            patch.setattr(ArrivingGemm, "multiply", failing)
            gathered_products._fused(comm, shards[comm.rank], gathered, [weight], [out], SMALL, 4)
        words = comm._executor.workspaces[-1]._arrivals  # type: ignore[union-attr]
        assert not words.any(), "the next product would not wait"
    assert steps > 20
    return early


def replayed(case: Case, ways: Sequence[str]) -> list[str]:
    """Replay graphs of gathered products on changed rows, with eager calls between. Return what is wrong."""
    wrong = []
    with shotcast.Communicator(device="cuda", timeout_s=100) as comm:
        lanes = shotcast.overlap.lanes_of(comm)
        shards, weights = operands(case, comm.world_size, 7, comm.device)
        rows = torch.zeros_like(shards[0])
        for way in ways:

            def call(way: str = way) -> list[torch.Tensor]:
                done = all_gather_matmul(lanes, rows, weights, way=way, config=case.config, sms=case.sms)
                return [*done.products, comm.all_reduce(rows)]

            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = call()
            for number in range(6):
                changed = [one * (number + 1) for one in shards]
                rows.copy_(changed[comm.rank])
                graph.replay()
                for weight, product in zip(weights, results, strict=False):
                    if not torch.equal(product, ShapedProduct(case.config)(torch.cat(changed), weight)):
                        wrong.append(f"{way}, replay {number}")
                if number % 2 and not torch.equal(call()[0], results[0]):
                    wrong.append(f"{way}, between replays {number}")
        lanes.close()
        torch.cuda.synchronize()
        comm.check()
    return wrong


def measured() -> tuple[int, int]:
    """Make calls of slightly different numbers of rows; return how often ways were measured, and what is remembered."""
    times, decide = 0, adaptive.decide

    def counted(*args: Any, **given: Any) -> Any:
        nonlocal times
        times += 1
        return decide(*args, **given)

    adaptive.decide, adaptive.MOST_KEPT = counted, 6
    gathered_products.choose_way = lambda *args: "fused"
    with shotcast.Communicator(device="cpu", max_bytes=1 << 20, timeout_s=100) as comm:
        for rows in range(20, 32, 2):
            case = Case(rows, 32, (32,), torch.bfloat16, SMALL, 2)
            shards, weights = operands(case, comm.world_size, 3, comm.device)
            all_gather_matmul(comm, shards[comm.rank], weights, config=SMALL, sms=2)
            if rows < 26:
                all_gather_matmul(comm, shards[comm.rank], weights, way="fused", config=SMALL, sms=2)
        return times, len(adaptive.Cache.of(comm, gathered_products.__name__).known)


def absent(device: str, timeout_s: float) -> dict[str, Any]:
    """Have rank 1 make no call, and then all of them after a reset. Return what rank 0 saw."""
    case = Case(32, 64, (64,), torch.bfloat16, SMALL, 2)
    with shotcast.Communicator(device=device, max_bytes=1 << 20, timeout_s=timeout_s) as comm:
        shards, weights = operands(case, comm.world_size, 3, comm.device)

        def call() -> torch.Tensor:
            (product,) = all_gather_matmul(comm, shards[comm.rank], weights, way="fused", config=SMALL, sms=2).products
            if device == "cuda":
                torch.cuda.synchronize()
            comm.check()
            return product

        wanted = call()
        comm._host.barrier()
        seen: dict[str, Any] = {}
        if comm.rank == 0:
            begun = time.monotonic()
            try:
                call()
            except shotcast.CollectiveTimeout as error:
                seen = {"late": error.missing, "text": str(error)}
            seen["took"] = time.monotonic() - begun
        comm._host.barrier()
        comm.reset()
        seen["again"] = torch.equal(call(), wanted)
        return seen


def refused() -> None:
    """Make calls by every way that are refused before anything is sent."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 20, timeout_s=100) as comm:
        rows, weight = torch.ones(32, 64).bfloat16(), torch.ones(64, 32).bfloat16()
        for way in ("auto", "fused", "sequential"):

            def call(a: Any = rows, b: Any = weight, sms: Any = 2, way: str = way) -> list[torch.Tensor]:
                return all_gather_matmul(comm, a, b, way=way, config=SMALL, sms=sms).products

            for sms in (True, -1, 1.5):
                with pytest.raises(shotcast.ConfigError, match="sms is a whole number"):
                    call(sms=sms)
            with pytest.raises(shotcast.ConfigError, match="a_shard is on meta; this communicator serves cpu"):
                call(rows.to("meta"), weight.to("meta"))
            trained = weight.clone().requires_grad_()
            with pytest.raises(shotcast.UnsupportedError, match="all_gather_matmul has no derivative, and b requires"):
                call(b=[weight, trained])
            with pytest.raises(shotcast.UnsupportedError, match="and a_shard requires grad"):
                call(rows.clone().requires_grad_())
            with torch.no_grad():
                assert torch.equal(call(b=trained)[0], call()[0])


def other_order() -> bool:
    """Have rank 1 walk through tiles in another order, which concerns no other rank; return whether bits are right."""
    case = Case(48, 32, (96,), config=SMALL)
    with shotcast.Communicator(device="cpu", max_bytes=1 << 20, timeout_s=100) as comm:
        shards, weights = operands(case, comm.world_size, 0, comm.device)
        wanted = plain(comm, shards[comm.rank], weights[0], case)
        config = replace(SMALL, group=1 + 2 * comm.rank)
        return all(
            torch.equal(
                all_gather_matmul(comm, shards[comm.rank], weights, way="fused", config=config).products[0], wanted
            )
            for _ in range(2)
        )


def different_weights(device: str) -> str:
    """Gather rows of another length on rank 1. Return the error of this rank."""
    with shotcast.Communicator(device=device, max_bytes=1 << 20, timeout_s=100) as comm:
        rows = torch.ones(32, 64 + 16 * comm.rank, device=comm.device).bfloat16()
        try:
            all_gather_matmul(comm, rows, rows.t(), way="fused", config=SMALL, sms=2)
            if device == "cuda":
                torch.cuda.synchronize()
            comm.check()
        except shotcast.ShotcastError as error:
            return f"{type(error).__name__}: {error}"
    return ""
