"""The programs of ranks in the tests of overlap."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import expected_results
import torch

import shotcast
from shotcast.overlap import Chain, chain

SIZES = (1000, 1, 40_000, 333)


def all_ways(device: str = "cpu") -> dict[str, Any]:
    """Run a chain in each way; return the results, and what ``auto`` decided."""
    found: dict[str, Any] = {}
    with shotcast.Communicator(device=device) as comm, comm.split(0) as second:
        communicators = comm if device == "cuda" else (comm, second)
        computations = [_computation(comm, number) for number in range(len(SIZES))]
        for way in ("sequential", "plain", "library", "auto", *(["priority", "8 SMs"] if device == "cuda" else [])):
            one = chain(communicators, computations, way=way, sms=(8,))
            found[way] = [x.cpu() for x in one()]
            found[f"{way} again"] = [x.cpu() for x in one()]
            if device == "cuda":
                found[f"{way} captured"] = _captured(one)
            if way == "auto":
                found["decision"] = one.decision
            one.close()
        gathered = chain(comm, computations, lambda comm, x: comm.all_gather(x), way="plain")
        found["gathered"] = [x.cpu() for x in gathered()]
        gathered.close()
    return found


def served_by_the_library() -> tuple[list[str], list[str]]:
    """Run a chain by the library. Return the ways that would be measured, and the algorithm of each call."""
    asked = []
    with shotcast.Communicator(device="cpu") as comm:
        real = comm.all_reduce

        def all_reduce(x: torch.Tensor, **options: Any) -> torch.Tensor:
            asked.append(options["algorithm"])
            return real(x, **options)

        comm.all_reduce = all_reduce  # type: ignore[method-assign]
        one = chain(comm, [_computation(comm, number) for number in range(len(SIZES))], way="library")
        for number, total in enumerate(one()):
            everyone = torch.stack([inputs(rank, number).double() for rank in range(comm.world_size)])
            torch.testing.assert_close(total.double(), everyone.sum(0), rtol=0.02, atol=0.02)
        ways = [known.name for known in one.ways()]
        one.close()
    return ways, asked


def _captured(one: Chain) -> list[torch.Tensor]:
    """Return the results of the second replay of a chain that is captured in a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = one()
    for x in results:
        x.zero_()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return [x.cpu() for x in results]


def _computation(comm: shotcast.Communicator, number: int) -> Callable[[], torch.Tensor]:
    own = inputs(comm.rank, number).to(comm.device)
    return lambda: own * 1


def inputs(rank: int, number: int) -> torch.Tensor:
    return torch.randn(SIZES[number], generator=torch.Generator().manual_seed(100 * rank + number)).bfloat16()


def expected_sum(ranks: int, number: int) -> torch.Tensor:
    return expected_results.all_reduce([inputs(rank, number) for rank in range(ranks)], "one_shot")


def late_ranks(seconds: float) -> list[float]:
    """Run a chain of which each rank is late in another step; return the first value of each result."""
    with shotcast.Communicator(device="cpu") as comm:

        def computation(number: int) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                if number % comm.world_size == comm.rank:
                    time.sleep(seconds)
                return torch.full((3,), float(10**number * (comm.rank + 1)))

            return run

        one = chain(comm, [computation(number) for number in range(4)], way="plain")
        found = [float(x[0]) for x in one()]
        one.close()
        return found


def different_chains() -> str:
    """Make a chain that is longer on rank 1; return what this rank gets."""
    with shotcast.Communicator(device="cpu") as comm:
        one = chain(comm, [lambda: torch.ones(4)] * (2 + comm.rank), way="plain")
        try:
            one()
        except shotcast.ConfigError as error:
            return str(error)
        finally:
            one.close()
        return "nothing"


def failing(step: str) -> str:
    """Run a chain in which rank 1 raises in a step; return what this rank gets."""
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:

        def computation() -> torch.Tensor:
            if step == "compute" and comm.rank == 1:
                raise ValueError("rank 1 cannot compute")
            return torch.ones(4)

        def communicate(comm: shotcast.Communicator, x: torch.Tensor) -> torch.Tensor:
            return comm.all_reduce(x[: 4 - comm.rank] if step == "communicate" else x)

        one = chain(comm, [lambda: torch.ones(4), computation], communicate, way="plain")
        try:
            one()
        except (ValueError, shotcast.ShotcastError) as error:
            return type(error).__name__
        finally:
            one.close()
        return "nothing"


def block(ways: Sequence[tuple[str, str]], device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """Run a block of a column-parallel and a row-parallel layer, forward and backward, by each pair of ways."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    up, down = torch.nn.Linear(24, 64), torch.nn.Linear(64, 24)
    x = torch.randn(4, 40, 24)
    dy = torch.randn(4, 40, 24)
    found = []
    with shotcast.Communicator(device=device, exclusive=True) as comm:
        x, dy = x.to(comm.device), dy.to(comm.device)
        lanes = shotcast.overlap.lanes_of(comm)
        for column_way, row_way in ways:
            column = shotcast.overlap.ColumnParallelLinear(lanes, up, column_way)
            row = shotcast.overlap.RowParallelLinear(lanes, down, row_way)
            one = x.clone().requires_grad_()
            y = row(torch.nn.functional.gelu(column(one)))
            y.backward(dy)
            assert column.bias is not None
            assert row.bias is not None
            assert one.grad is not None
            grads = {"up": column.weight.grad, "up bias": column.bias.grad}
            grads |= {"down": row.weight.grad, "down bias": row.bias.grad}
            assert len(column.adaptive.decisions) == len(row.adaptive.decisions) == (column_way == "auto")
            for decision in row.adaptive.decisions.values():
                assert set(decision.median_us) == {"sequential", "2 chunks", "4 chunks", "8 chunks"}
            grads |= {"y": y.detach(), "dx": one.grad}
            found.append({name: value.cpu() for name, value in grads.items() if value is not None})
        lanes.close()
    return found


def block_by_rows(
    ways: Sequence[str], device: str = "cpu", dtype: torch.dtype = torch.float32, sms: int | None = None
) -> list[dict[str, torch.Tensor]]:
    """Run a block of layers with sequence parallelism, forward and backward, in each way.

    On CPU ranks, the last way is run again with parameters that need no gradients.
    """
    torch.set_num_threads(1)
    up, down, x, dy = inputs_of_block(dtype)
    found = []
    with shotcast.Communicator(device=device, exclusive=True) as comm:
        own, own_dy = (one.chunk(comm.world_size)[comm.rank].to(comm.device) for one in (x, dy))
        lanes = shotcast.overlap.lanes_of(comm)
        for way in ways:
            column = shotcast.overlap.ColumnParallelLinear(lanes, up, way, sequence_parallel=True, sms=sms)
            row = shotcast.overlap.RowParallelLinear(lanes, down, way, sequence_parallel=True, sms=sms)
            one = own.clone().requires_grad_()
            y = row(torch.nn.functional.gelu(column(one)))
            y.backward(own_dy)
            grads = {"up": column.weight.grad, "down": row.weight.grad, "dx": one.grad, "y": y.detach()}
            grads |= {"up bias": column.bias.grad, "down bias": row.bias.grad}  # type: ignore[union-attr]
            found.append({name: value.to("cpu", copy=True) for name, value in grads.items() if value is not None})
        if device == "cpu":
            column.requires_grad_(False)
            row.weight.requires_grad_(False)
            one = own.clone().requires_grad_()
            row(torch.nn.functional.gelu(column(one))).backward(own_dy)
            assert torch.equal(one.grad, found[-1]["dx"])  # type: ignore[arg-type]
            assert torch.equal(row.bias.grad, 2 * found[0]["down bias"])  # type: ignore[union-attr,arg-type]
            assert column(own[:0]).shape == (0, 32, 48 // comm.world_size)
        lanes.close()
    return found


def numbers_of_sms(sms: int) -> list[tuple[str, int | None]]:
    """Use layers with this number of SMs; return the collectives that they make, with theirs."""
    seen: list[tuple[str, int | None]] = []
    up, down, x, _ = inputs_of_block(torch.float32)
    with shotcast.Communicator(device="cpu") as comm:

        def noted(name: str) -> Callable[..., Any]:
            call = getattr(comm, name)

            def call_it(*args: Any, **given: Any) -> Any:
                seen.append((name, given.get("sms")))
                return call(*args, **given)

            return call_it

        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            setattr(comm, name, noted(name))
        for by_rows in (False, True):
            for way in ("sequential", "plain", "2 chunks"):
                lanes = shotcast.overlap.lanes_of(comm)
                column = shotcast.overlap.ColumnParallelLinear(lanes, up, way, by_rows, sms=sms)
                row = shotcast.overlap.RowParallelLinear(lanes, down, way, sms=sms)
                one = x.clone().requires_grad_()
                row(column(one)).sum().backward()
                lanes.close()
        for way in ("sequential", "plain"):
            row = shotcast.overlap.RowParallelLinear(comm, down, way, True, sms=sms)
            made = len(seen)
            y = row(x.new_zeros(24, 32, 48 // comm.world_size))
            assert {name for name, _ in seen[made:]} == {"reduce_scatter"}, way
            y.sum().backward()
    return seen


def inputs_of_block(dtype: torch.dtype) -> tuple[torch.nn.Linear, torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """Return the whole layers of a block, its input and the gradient of its output, the same on all ranks."""
    torch.manual_seed(0)
    up, down = torch.nn.Linear(24, 48).to(dtype), torch.nn.Linear(48, 24).to(dtype)
    return up, down, torch.randn(24, 32, 24).to(dtype), torch.randn(24, 32, 24).to(dtype)


def uncommon_uses_of_layers() -> dict[str, Any]:
    """Use layers under autocast, with weights that change, frozen, copied, and on no rows. Return what was seen."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    up, down = torch.nn.Linear(24, 64), torch.nn.Linear(64, 24)
    x = torch.randn(10, 24)
    seen: dict[str, Any] = {}
    with shotcast.Communicator(device="cpu") as comm:
        lanes = shotcast.overlap.lanes_of(comm)
        column = shotcast.overlap.ColumnParallelLinear(lanes, up, "plain")
        row = shotcast.overlap.RowParallelLinear(lanes, down, "sequential")
        one = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = row(column(one))
        y.float().sum().backward()
        assert one.grad is not None
        seen["autocast"] = y.dtype, y.detach().float(), one.grad.clone(), column.weight.grad.dtype
        one.grad = None
        y = row(column(one))
        with torch.no_grad():
            row.weight.mul_(2)
        seen["changed"] = ""
        try:
            y.sum().backward()
        except RuntimeError as error:
            seen["changed"] = str(error)
        with torch.no_grad():
            row.weight.div_(2)
            given = {"weight": torch.zeros_like(row.weight), "bias": row.bias}
            seen["given"] = torch.func.functional_call(row, given, (column(x),)), row.bias.detach().clone()
            seen["copy"] = torch.equal(copy.deepcopy(row)(column(x)), row(column(x)))
        seen["pickled"] = ""
        try:
            pickle.dumps(row)
        except TypeError as error:
            seen["pickled"] = str(error)
        seen["empty"] = tuple(row(column(x[:0])).shape), tuple(row(column(x[0])).shape)
        frozen = shotcast.overlap.ColumnParallelLinear(lanes, up.requires_grad_(False), "plain")
        one.grad = None
        frozen(one).sum().backward()
        seen["frozen"] = frozen.weight.requires_grad, frozen.bias.requires_grad, one.grad.clone()  # type: ignore[union-attr]
        lanes.close()
    return seen


def chain_by_another_way() -> str:
    """Run a chain that each rank would run by another way. Return the error."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        one = chain(comm, [lambda: torch.ones(3)] * 2, way=("sequential", "plain")[comm.rank])
        try:
            one()
        except shotcast.ConfigError as error:
            return str(error)
        finally:
            one.close()
    return ""
