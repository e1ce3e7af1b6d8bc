"""The programs of ranks in the tests of products that are summed over the ranks."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shotcast
from shotcast.kernels.triton.gemm import GemmConfig, GemmForm
from shotcast.overlap import (
    RowParallelLinear,
    adaptive,
    explain_product,
    matmul_all_reduce,
    matmul_reduce_scatter,
    products,
)
from shotcast.overlap.products import ShapedProduct

SMALL = GemmConfig(16, 16, 16, 2, 4, group=2)
CALLS = {"matmul_reduce_scatter": matmul_reduce_scatter, "matmul_all_reduce": matmul_all_reduce}


@dataclass(frozen=True)
class Case:
    """A call: its sizes, the layout of its operands, and elements by which they miss an alignment."""

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    a_by_columns: bool = False
    b_by_columns: bool = True
    shift: int = 0
    config: GemmConfig | None = SMALL


def operands(case: Case, rank: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of a rank, which every rank can make.

    Those of the interpreter are whole numbers, whose sums are exact: NumPy rounds others by where they are in a tile.
    """
    generator = torch.Generator().manual_seed(1000 * rank + case.m * 31 + case.n * 7 + case.k)

    def matrix(rows: int, columns: int, by_columns: bool) -> torch.Tensor:
        if by_columns:
            return matrix(columns, rows, False).t()
        flat = torch.randn(rows * columns + case.shift, generator=generator)
        if torch.device(device).type == "cpu" and case.dtype is not torch.float32:
            flat = (4 * flat).round()
        flat = flat.to(case.dtype).to(device)
        return flat[case.shift :].view(rows, columns)

    return matrix(case.m, case.k, case.a_by_columns), matrix(case.k, case.n, case.b_by_columns)


def expected(case: Case, comm: shotcast.Communicator) -> torch.Tensor:
    """Return the products of all ranks, rounded, and added in float32 in the order of ranks; this rank's part."""
    total = torch.zeros(case.m, case.n, device=comm.device)
    for rank in range(comm.world_size):
        a, b = operands(case, rank, comm.device)
        total += ShapedProduct(case.config)(a.contiguous(), b.contiguous()).float()
    part = total.to(case.dtype)
    return part.chunk(comm.world_size)[comm.rank] if case.op == "matmul_reduce_scatter" else part


def check(case: Case, comm: shotcast.Communicator, got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape, case
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)), case


def bits(cases: list[Case], rounds: int, device: str = "cpu", max_bytes: int | None = None) -> int:
    """Compare calls with what they must give, in and out of place, with stragglers and other calls between."""
    done = 0
    with shotcast.Communicator(device=device, max_bytes=max_bytes, timeout_s=300, exclusive=True) as comm:
        late = random.Random(comm.rank)
        for case in cases:
            wanted = expected(case, comm)
            a, b = operands(case, comm.rank, comm.device)
            for number in range(rounds):
                if late.random() < 0.3:
                    time.sleep(0.02 * late.random())
                out = torch.full_like(wanted, float("nan")) if number % 2 else None
                got = CALLS[case.op](comm, a, b, out=out, way="fused", config=case.config)
                check(case, comm, got, wanted)
                assert out is None or got is out
                if number == 0 and max_bytes is None:  # the library sums what a small workspace has no room for
                    again = CALLS[case.op](comm, a, b, way="sequential", config=case.config)
                    check(case, comm, again, wanted)
                    comm.all_reduce(torch.ones(700, dtype=case.dtype, device=comm.device))  # uses the slots too
                done += 1
        if device == "cuda":
            torch.cuda.synchronize()
        comm.check()
    return done


def exact(case: Case, device: str = "cpu") -> float:
    """Return the largest error relative to float64, over what sums and roundings in the dtype may add."""
    with shotcast.Communicator(device=device, exclusive=True) as comm:
        a, b = operands(case, comm.rank, comm.device)
        got = CALLS[case.op](comm, a, b, way="fused", config=case.config).double()
        pairs = [operands(case, rank, comm.device) for rank in range(comm.world_size)]
        products = [a.double() @ b.double() for a, b in pairs]
        total, size = sum(products), sum(a.double().abs() @ b.double().abs() for a, b in pairs)
        eps = torch.finfo(case.dtype).eps
        bound = sum(one.abs() for one in products) * eps + size * 2**-20
        if case.op == "matmul_reduce_scatter":
            total, bound = total.chunk(comm.world_size)[comm.rank], bound.chunk(comm.world_size)[comm.rank]
        return float(((got - total).abs() / bound).max())


def failing(device: str, kind: str) -> dict[str, Any]:
    """Have rank 1 come late, or with another shape or call; return the error, and whether the output is NaN."""
    config, other = SMALL, GemmConfig(32, 16, 16, 2, 4, group=2)
    if device == "cuda":
        config, other = GemmConfig(64, 64, 32, 3, 4), GemmConfig(128, 64, 32, 3, 4)
    if kind == "group":  # the slots of tiles are numbered in the order in which they are computed
        other = replace(config, group=config.group + 1)
    case = Case("matmul_all_reduce", 64, 32, 32)
    found: dict[str, Any] = {}
    with shotcast.Communicator(device=device, timeout_s=2 if kind == "late" else 300, exclusive=True) as comm:
        a, b = operands(case, comm.rank, comm.device)
        out = matmul_all_reduce(comm, a, b, way="fused", config=config)
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.monotonic()
        try:
            if comm.rank == 1:
                if kind == "late":
                    time.sleep(6)
                    return found
                if kind == "rows":
                    a = a[:48]
                elif kind == "columns":
                    a, b = torch.cat((a, a)), b[:, :16]
                elif kind in ("tiles", "group"):
                    matmul_all_reduce(comm, a, b, out, way="fused", config=other)
                elif kind == "operation":
                    matmul_reduce_scatter(comm, a, b, way="fused", config=config)
                elif kind == "plain":
                    comm.all_reduce(torch.ones(64, 32, dtype=torch.bfloat16, device=comm.device), algorithm="two_shot")
            if comm.rank != 1 or kind in ("rows", "columns"):
                matmul_all_reduce(comm, a, b, out if comm.rank != 1 else None, way="fused", config=config)
            if device == "cuda":
                torch.cuda.synchronize()
            comm.check()
        except shotcast.ShotcastError as error:
            found["error"] = error
        found["took"] = time.monotonic() - began
        found["nan"] = bool(out.isnan().all())
        try:
            matmul_all_reduce(comm, a, b, way="fused", config=config)
        except shotcast.ShotcastError as error:
            found["again"] = type(error)
        return found


def reasons(device: str = "cpu", exclusive: bool = True) -> dict[str, str]:
    """Return what is said of calls that have one way, and of one that has two."""
    found = {}
    with shotcast.Communicator(device=device, exclusive=exclusive) as comm:
        for name, dtype, rows in (("float32", torch.float32, 32), ("bfloat16", torch.bfloat16, 32)):
            a, b = torch.ones(rows, 16, dtype=dtype, device=device), torch.ones(16, 24, dtype=dtype, device=device)
            found[name] = str(explain_product(comm, a, b, config=SMALL))
            for way in ("fused", "plain"):
                try:
                    matmul_reduce_scatter(comm, a, b, way=way, config=SMALL)
                    found[f"{name} {way}"] = "served"
                except shotcast.UnsupportedError as error:
                    found[f"{name} {way}"] = str(error)
    return found


def outputs_that_autograd_knows(way: str) -> dict[str, Any]:
    """Write into an output that a backward needs, into a leaf, and into one that requires grad."""
    found: dict[str, Any] = {}
    with shotcast.Communicator(device="cpu", timeout_s=60, exclusive=True) as comm:
        a, b = torch.ones(256, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)
        for op, call in CALLS.items():
            out = torch.ones(256 // (comm.world_size if op == "matmul_reduce_scatter" else 1), 16, dtype=a.dtype)
            weight = torch.ones_like(out, requires_grad=True)
            loss = (weight * out).sum()
            call(comm, a, b, out=out, way=way, config=SMALL)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            for leaf in (weight, weight[:]):
                with pytest.raises(shotcast.ConfigError, match=r"leaf Variable that requires grad .* out is written"):
                    call(comm, a, b, out=leaf, way=way, config=SMALL)
            with torch.no_grad():
                call(comm, a, b, out=weight, way=way, config=SMALL)
            recorded = weight * 2  # its old value takes no part in what is written
            if way == "sequential":
                call(comm, a, b, out=recorded, way=way, config=SMALL)
                recorded.sum().backward()
                found[op] = weight.grad.abs().max()  # type: ignore[union-attr]
            else:
                with pytest.raises(shotcast.UnsupportedError, match="gradient"):
                    call(comm, a, b, out=recorded, way=way, config=SMALL)
    return found


def refusals(device: str = "cpu") -> None:
    """Check that operands which do not fit are refused before anything is sent."""
    with shotcast.Communicator(device=device, exclusive=True) as comm:
        a, b = torch.ones(8, 4, device=device), torch.ones(4, 6, device=device)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"a": a[0]}, "a is a matrix"),
            ({"b": b[:3]}, "does not fit"),
            ({"b": b.half()}, "one floating-point dtype"),
            ({"a": a[:7]}, "7 rows are not divisible among 2 ranks"),
            ({"out": torch.ones(8, 6, device=device)}, "out is contiguous"),
            ({"way": "quickly"}, "way is 'quickly'"),
        ]
        for fields, text in wrong:
            with pytest.raises(shotcast.ConfigError, match=text):
                matmul_reduce_scatter(comm, **{"a": a, "b": b, **fields})
        with pytest.raises(
            shotcast.UnsupportedError, match=r"way 'plain': the rows .*, 4, are fewer than two chunks of"
        ):
            matmul_reduce_scatter(comm, a, b, way="plain")
        assert "fewer than two chunks" in str(explain_product(comm, a, b))
        a.requires_grad_()
        assert str(explain_product(comm, torch.cat([a] * 64), b)) == "sequential: it has no gradient"


def threads() -> dict[str, Any]:
    """Run both calls on CPU ranks in each way, which measures too; return the results and what was decided."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with shotcast.Communicator(device="cpu", exclusive=True) as comm:
        for op, dtype in (("matmul_reduce_scatter", torch.float32), ("matmul_all_reduce", torch.bfloat16)):
            case = Case(op, 520, 48, 40, dtype)
            a, b = operands(case, comm.rank, "cpu")
            results = [CALLS[op](comm, a, b, way=way) for way in ("sequential", "plain", "auto", "auto")]
            assert all(torch.equal(results[0], other) for other in results[1:]), op
            found[op] = results[0], asdict(explain_product(comm, a, b, op))
        a, b = operands(Case("matmul_all_reduce", 64, 8, 8, torch.float32), comm.rank, "cpu")
        a.requires_grad_()
        out = matmul_all_reduce(comm, a, b)
        out.sum().backward()
        found["gradient"] = a.grad
        found["wanted gradient"] = torch.ones(64, 8) @ b.t() * comm.world_size
    return found


def chosen_beside_the_library() -> dict[str, Any]:
    """Let calls be measured whose sums the library makes, in an order of its own; return what was decided."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with shotcast.Communicator(device="cpu", exclusive=True) as comm:
        for op, call in CALLS.items():
            for dtype in (torch.float32, torch.float64):
                a, b = operands(Case(op, 780, 47, 40, dtype), comm.rank, "cpu")
                call(comm, a, b)
                by_library = comm.explain(a @ b, op[7:]).by_library
                found[f"{op} {dtype}"] = by_library, asdict(explain_product(comm, a, b, op))
    return found


def measured() -> dict[str, Any]:
    """Make calls of slightly different numbers of rows; return how often ways were measured, and what was decided."""
    torch.set_num_threads(1)
    decided: list[Any] = []
    decide = adaptive.decide

    def counted(*args: Any, **given: Any) -> Any:
        decided.append(decide(*args, **given))
        return decided[-1]

    adaptive.decide = counted
    with shotcast.Communicator(device="cpu", exclusive=True) as comm:
        for rows in range(520, 530, 2):
            case = Case("matmul_reduce_scatter", rows, 48, 40, torch.float32)
            a, b = operands(case, comm.rank, "cpu")
            matmul_reduce_scatter(comm, a, b)
        few = a[:32]
        found = {"calls": len(decided), "explained": explain_product(comm, a, b), "few": explain_product(comm, few, b)}
        layer = RowParallelLinear(comm, torch.nn.Linear(40 * comm.world_size, 48), sequence_parallel=True)
        for rows in range(520, 530, 2):
            layer(torch.ones(rows, 40))
        found |= {"all": len(decided), "layer": dict(layer.adaptive.decisions), "last": decided[-1]}
        layer._lanes.close()
    return found


def products_of_odd_columns() -> list[bool]:
    """Return whether the copy engine serves each product that the sequential way makes; compare its sums."""
    seen: list[bool] = []
    bind = products._bind

    def noted(form: GemmForm, *args: Any) -> Any:
        seen.append(form.uses_tma)
        return bind(form, *args)

    with shotcast.Communicator(device="cpu", timeout_s=300, exclusive=True) as comm:
        for op, columns in (("matmul_reduce_scatter", 23), ("matmul_all_reduce", 24)):
            case = Case(op, 34, columns, 40)
            wanted = expected(case, comm)
            products._bind = noted
            got = CALLS[op](comm, *operands(case, comm.rank, "cpu"), way="sequential", config=SMALL)
            products._bind = bind
            check(case, comm, got, wanted)
    return seen


def different(old: str, new: str) -> int:
    """Make calls by a kernel with one line changed, with one rank's tiles late; return how many results were wrong."""
    from shotcast.transport.triton import matmul_reduce

    source = Path(matmul_reduce.__file__).read_text()
    assert source.count(old) == 1, old
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "changed_matmul_reduce.py"
        file.write_text(source.replace(old, new))
        found = importlib.util.spec_from_file_location("changed_matmul_reduce", file)
        assert found is not None
        assert found.loader is not None
        changed = importlib.util.module_from_spec(found)
        sys.modules[found.name] = changed
        found.loader.exec_module(changed)
        send_tile = changed.send_tile

        def send_late(*args: Any) -> None:
            time.sleep(0.2)
            send_tile(*args)

        matmul_reduce.matmul_reduce = changed.matmul_reduce
        wrong = 0
        with shotcast.Communicator(device="cpu", timeout_s=5, exclusive=True) as comm:
            try:
                for number in range(4):
                    total = comm.all_reduce(torch.full((140 + number,), 3.0), algorithm="one_shot")
                    wrong += not bool((total == 3 * comm.world_size).all())
                    case = Case("matmul_all_reduce", 64, 16, 16 * (number + 1))
                    wanted = expected(case, comm)
                    changed.send_tile = send_late if comm.rank == number % 2 else send_tile
                    got = matmul_all_reduce(comm, *operands(case, comm.rank, "cpu"), way="fused", config=SMALL)
                    wrong += not torch.equal(got, wanted)
            except shotcast.CollectiveTimeout:
                wrong += 1
        return wrong


def graphs(replays: int) -> int:
    """Capture both calls, with one of another workspace's size before, and replay them on changed inputs."""
    with shotcast.Communicator(device="cuda", timeout_s=60, exclusive=True) as comm:
        cases = [Case(op, 512, 768, 256, config=None) for op in CALLS]
        pairs = [operands(case, comm.rank, comm.device) for case in cases]
        outs = [CALLS[case.op](comm, *pair, way="fused") for case, pair in zip(cases, pairs, strict=True)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for case, pair, out in zip(cases, pairs, outs, strict=True):
                CALLS[case.op](comm, *pair, out=out, way="fused")
        wanted = [expected(case, comm) for case in cases]
        large = Case("matmul_all_reduce", 4096, 4096, 64, config=None)  # a larger workspace, beside the graph's
        got = matmul_all_reduce(comm, *operands(large, comm.rank, comm.device), way="fused")
        check(large, comm, got, expected(large, comm))
        for number in range(replays):
            for (a, _), out in zip(pairs, outs, strict=True):
                a.mul_(0.5)
                out.fill_(float("nan"))
            if comm.rank == number % comm.world_size:
                torch.cuda._sleep(2_000_000)
            graph.replay()
            for case, out, right in zip(cases, outs, wanted, strict=True):
                check(case, comm, out, right * 0.5 ** (number + 1))
        comm.check()
    return replays


def chosen(device: str) -> dict[str, Any]:
    """Let both calls be measured, and return the decisions; that of few rows is the library's."""
    found: dict[str, Any] = {}
    with shotcast.Communicator(device=device, timeout_s=60, exclusive=True) as comm:
        for op, call in CALLS.items():
            case = Case(op, 32, 32, 16) if device == "cpu" else Case(op, 2048, 4096, 512, config=None)
            a, b = operands(case, comm.rank, comm.device)
            for _ in range(3):
                check(case, comm, call(comm, a, b, config=case.config), expected(case, comm))
            found[op] = explain_product(comm, a, b, op, config=case.config)
        if device == "cpu":
            return found
        few = Case("matmul_all_reduce", 16, 512, 512, config=None)
        a, b = operands(few, comm.rank, comm.device)
        found["small"] = explain_product(comm, a, b, "matmul_all_reduce")
        small = matmul_all_reduce(comm, a, b)
        found["close"] = torch.allclose(small.float(), expected(few, comm).float(), rtol=0.02, atol=0.5)
    return found


def stopped(victim: int) -> dict[str, Any]:
    """Have a rank end between calls; return what the others get, and how soon."""
    case = Case("matmul_reduce_scatter", 1024, 1024, 512, config=None)
    with shotcast.Communicator(device="cuda", timeout_s=100, exclusive=True) as comm:
        a, b = operands(case, comm.rank, comm.device)
        matmul_reduce_scatter(comm, a, b, way="fused")
        torch.cuda.synchronize()
        if comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        out = matmul_reduce_scatter(comm, a, b, way="fused")
        torch.cuda.synchronize()
        with pytest.raises(shotcast.CollectiveTimeout) as error:
            comm.check()
        return {"error": error.value, "took": time.monotonic() - began, "nan": bool(out.isnan().all())}
