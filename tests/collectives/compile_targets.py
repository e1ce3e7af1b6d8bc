"""Functions that the ranks of tests/collectives/test_compile.py and test_cuda_compile.py run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shotcast
from shotcast import Communicator
from shotcast.collectives.norm_operands import Fp8Normed
from shotcast.collectives.torch_ops import operators


def with_nothing_compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(*args)`` after PyTorch has forgotten all compiled code of this process."""
    torch._dynamo.reset()
    counters.clear()
    return fn(*args)


def values(comm: Communicator, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return different numbers on each rank. Their sums round, so the order of additions shows."""
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(comm.device, dtype)


def assert_same(got: Any, wanted: Any) -> None:
    """Check that tensors are equal bit by bit, and in shape, dtype, strides and requires_grad."""
    assert len(got) == len(wanted)
    for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), number
        assert a.requires_grad == b.requires_grad, number
        left, right = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(left, right), (number, a, b)


def every_call(comm: Communicator, x: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Make each method's call in each of its forms. ``x`` and ``into`` are changed."""
    n, rank = comm.world_size, comm.rank
    lengths = [3 * r for r in range(n)]  # rank 0 gives nothing
    total = comm.all_reduce(x)
    largest = comm.all_reduce(x, reduction="max")
    part = comm.reduce_scatter(total, algorithm="one_shot")
    whole = comm.all_gather(part)
    uneven = comm.all_gather(total[: lengths[rank]], sizes=lengths)
    turned = comm.all_to_all(whole * (rank + 1))
    single = comm.all_gather(total.amax())
    root = comm.broadcast(turned.clone(), n - 1)
    comm.all_reduce(x, out=x, algorithm="two_shot")  # in place, on an input of the graph
    comm.reduce_scatter(x + root, out=into)
    mean = root / n
    comm.all_reduce(mean, out=mean)  # in place, on a tensor of the graph
    gathered = torch.empty(n * into.shape[0], *into.shape[1:], device=x.device)
    comm.all_gather(into, out=gathered)
    parts = torch.empty(sum(lengths), *x.shape[1:], device=x.device)
    comm.all_gather(x[: lengths[rank]], out=parts, sizes=lengths)
    swapped = torch.empty_like(x)
    comm.all_to_all(x, out=swapped)
    comm.barrier()
    message = torch.zeros_like(x)
    if rank == 0:
        comm.send(swapped, n - 1)
    elif rank == n - 1:
        comm.recv(message, 0)
    return total, largest, part, whole, uneven, turned, single, root, mean, gathered, parts, swapped, message


def compiled_equals_eager(backend: str) -> int:
    """Compare compiled calls with eager ones. Return how many graphs were compiled for three calls."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n = comm.world_size
        call = functools.partial(every_call, comm)
        traced = torch.compile(lambda x, into: call(x, into), fullgraph=True, backend=backend)
        for seed in range(3):
            x, into = values(comm, 6 * n, 5, seed=seed), torch.zeros(6, 5)
            y, there = x.clone(), into.clone()
            wanted = call(x, into)
            got = traced(y, there)
            assert_same((*got, y, there), (*wanted, x, into))
        return counters["stats"]["unique_graphs"]


def dynamic_sizes(backend: str) -> int:
    """Compare compiled calls of changing size with eager ones. Return how many graphs were compiled for four sizes."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n = comm.world_size

        def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            total = comm.all_reduce(x * 2)
            part = comm.reduce_scatter(total.cos())
            return total, part, comm.all_gather(part.sin()), comm.all_to_all(total)

        traced = torch.compile(call, fullgraph=True, backend=backend)
        for rows in (3 * n, 4 * n, 7 * n, 50 * n):
            x = values(comm, rows, 3, seed=rows)
            torch._dynamo.mark_dynamic(x, 0)
            got = traced(x)
            for a, b in zip(got, call(x), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # Inductor has its own cosine
        return counters["stats"]["unique_graphs"]


def gradients(backend: str, every: bool) -> int:
    """Compare the backward of each differentiable call, compiled and eager. Return the number of cases.

    Without ``every``, some calls of other dtypes than float32 are left out.
    """
    done = 0
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n, rank = comm.world_size, comm.rank
        lengths = [2 * r for r in range(n)]
        calls: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
            "all_reduce": (lambda x: comm.all_reduce(x * 3), 2 * n),
            "ring": (lambda x: comm.all_reduce(x, algorithm="ring"), 2 * n),
            "reduce_scatter": (lambda x: comm.reduce_scatter(x), 2 * n),
            "average": (lambda x: comm.all_reduce(x, reduction="avg"), 2),
            "average of parts": (lambda x: comm.reduce_scatter(x, reduction=dist.ReduceOp.AVG), 2 * n),
            "all_gather": (lambda x: comm.all_gather(x), 2),
            "all_gather of numbers": (lambda x: comm.all_gather(x.sum()), 2),
            "uneven": (lambda x: comm.all_gather(x, sizes=lengths), lengths[rank]),
            "all_to_all": (lambda x: comm.all_to_all(x), 2 * n),
            "transposed": (lambda x: comm.all_reduce(x).t(), 2),
            "twice": (lambda x: comm.all_reduce(comm.all_reduce(x).relu()), 2),
        }
        written: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
            "max": (lambda x: comm.all_reduce(x, reduction="max"), 2),
            "prod": (lambda x: comm.reduce_scatter(x, reduction=dist.ReduceOp.PRODUCT), 2 * n),
            "in place": (lambda x: comm.all_reduce(y := x * 3, out=y) * x, 2),
            "max in place": (lambda x: comm.all_reduce(y := x * 3, out=y, reduction="max") * x, 2),
            "into what has a history": (lambda x: comm.all_gather(x.sin(), out=torch.cat([x * 3] * n)).cos(), 2),
            "into what has none": (lambda x: comm.all_to_all(x, out=torch.zeros_like(x)), 2 * n),
            "broadcast": (lambda x: comm.broadcast(x * 2, n - 1).sin() * x, 2),
        }
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for name, (call, rows) in (calls | written if dtype is torch.float32 else calls).items():
                if dtype is torch.float64 and name == "ring":
                    continue
                if (
                    dtype is not torch.float32
                    and not every
                    and name not in ("all_reduce", "average of parts", "uneven")
                ):
                    continue
                x = values(comm, rows, 3, dtype=dtype).requires_grad_()
                weight = values(comm, *call(x).shape, seed=2, dtype=dtype)
                y = x.detach().clone().requires_grad_()
                (call(x) * weight).sum().backward()
                (torch.compile(call, fullgraph=True, backend=backend)(y) * weight).sum().backward()
                assert_same([y.grad], [x.grad])
                done += 1
        # Ring and one-shot gather float64 but cannot add it up: the backward chooses an algorithm that can.
        x = values(comm, 2, 3, dtype=torch.float64).requires_grad_()
        torch.compile(lambda x: comm.all_gather(x, algorithm="one_shot"), fullgraph=True, backend=backend)(
            x
        ).sum().backward()
        assert x.grad.tolist() == [[float(n)] * 3] * 2

        with torch.no_grad():
            assert not torch.compile(lambda x: comm.all_reduce(x), fullgraph=True, backend=backend)(x).requires_grad
        leaf = torch.ones(2, 3, requires_grad=True)
        for write in (lambda x: comm.all_reduce(x, out=x), lambda x: comm.broadcast(x, 0)):
            with pytest.raises(Exception, match="a leaf Variable that requires grad is being used in an in-place"):
                torch.compile(write, fullgraph=True, backend=backend)(leaf)
        first = torch.autograd.grad(
            torch.ops.shotcast.all_reduce(x, comm.name, "auto", "max").square().sum(), x, create_graph=True
        )
        with pytest.raises(shotcast.UnsupportedError, match="no second derivative in a graph"):
            first[0].sum().backward()
    return done


def opcheck() -> list[str]:
    """Run PyTorch's own checks of schemas, fake kernels, derivatives and traces.

    Return the operators that were checked.
    """
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n, rank, name = comm.world_size, comm.rank, comm.name
        x = values(comm, 2 * n, 3).requires_grad_()
        normed = values(comm, 2 * n, 16), values(comm, 2 * n, 16, seed=1), values(comm, 16)
        arguments: dict[str, list[tuple[Any, ...]]] = {
            "all_reduce": [(x, name, "auto", "sum"), (x, name, "vendor", "max")],
            "all_reduce_gradient": [(x.detach(), x.detach(), name, "prod")],
            "reduce_scatter_gradient": [(x.detach(), x.detach()[:2], name, "min")],
            "sum_at_root": [(x, name, n - 1)],
            "reduce_scatter": [(x, name, n, "auto", "sum"), (x.detach().double(), name, n, "ring", "sum", False)],
            "all_gather": [(x, name, n, "auto")],
            "all_gather_uneven": [(x[: rank + 1], name, list(range(1, n + 1)), rank, "auto")],
            "all_to_all": [(x, name, "auto")],
            "broadcast": [(x, name, n - 1, "auto")],
            "send": [(x.detach(), name, n - 1 - rank)],
            "recv": [(x.detach(), name, n - 1 - rank)],
            "barrier": [(name,)],
            "all_to_all_uneven": [(x, name, [2] * n, [2] * n, rank, "auto")],
            "reduce": [(x, name, 0, int(rank == 0), "auto", "sum")],
            "reduce_gradient": [(x.detach(), x.detach(), name, 0, "prod")],
            "gather": [(x, name, 0, n if rank == 0 else 0, "auto")],
            "gathered_or_zeros": [(x.detach(), name, 0, n, "auto")],
            "scatter": [(x, name, 0, n, "auto")],
            "scattered": [(x.detach(), name, 0, [2, 3], "auto")],
            "spread": [(x.detach(), name, [2 * n, 3], 0, "sum"), (x.detach(), name, [2 * n, 3], 0, "avg")],
            "all_reduce_rms_norm": [(*normed, name, 1e-6, "auto")],
            "all_reduce_rms_norm_fp8": [
                (*normed, None, name, 1e-6, False, "auto"),
                (*normed, torch.ones(()), name, 1e-6, True, "auto"),
            ],
            "all_reduce_layer_norm": [(*normed, bias, name, 1e-5, "auto") for bias in (None, normed[2])],
            "all_reduce_layer_norm_fp8": [
                (*normed, None, None, name, 1e-5, False, "auto"),
                (*normed, normed[2], torch.ones(()), name, 1e-5, True, "auto"),
            ],
        }
        assert sorted(arguments) == sorted(operators.OPERATORS)
        # The calls must match: what one rank sends, the other receives, equally often.
        checked = [op for op in arguments if op not in ("send", "recv")]
        for op in [*checked, "send" if rank == 0 else "recv", "recv" if rank == 0 else "send"]:
            for args in arguments[op]:
                torch.library.opcheck(getattr(torch.ops.shotcast, op).default, args)
        return [*checked, "send", "recv"]


class Block(nn.Module):
    """Two linear layers, the first split by columns and the second by rows, and a residual."""

    def __init__(self, comm: Communicator, hidden: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.comm = comm
        generator = torch.Generator().manual_seed(5)
        up, down = (torch.randn(4 * hidden, hidden, generator=generator) / hidden**0.5 for _ in range(2))
        mine = slice(comm.rank * 4 * hidden // comm.world_size, (comm.rank + 1) * 4 * hidden // comm.world_size)
        self.up = nn.Parameter(up[mine].to(comm.device, dtype))
        self.down = nn.Parameter(down[mine].to(comm.device, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.comm.all_reduce((x @ self.up.t()).relu() @ self.down)


def model_equals_eager(backend: str) -> int:
    """Compare inference and training of three layers, compiled and eager. Return how many graphs were compiled."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        model = nn.Sequential(*(Block(comm, 24) for _ in range(3)))
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
        traced = torch.compile(model, fullgraph=True, backend=backend)
        with torch.no_grad():
            assert_same([traced(x)], [model(x)])
            with torch.compiler.set_stance("fail_on_recompile"):
                assert_same([traced(2 * x)], [model(2 * x)])
        grads = []
        for run in (model, traced):
            model.zero_grad()
            out = run(x)
            out.square().sum().backward()
            grads.append([out, *(parameter.grad.clone() for parameter in model.parameters())])
        assert_same(*grads)
        whole = torch.empty(comm.world_size, *grads[0][0].shape)
        comm.all_gather(grads[1][0].detach()[None], out=whole)
        assert all(torch.equal(whole[0], other) for other in whole)
        return counters["stats"]["unique_graphs"]


def fused_calls(comm: Communicator, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[Any]:
    """Make each fused method's call in each of its forms. ``residual`` is changed."""
    given = torch.full((), 0.25, device=x.device)
    results: list[torch.Tensor] = []
    results += comm.all_reduce_rms_norm(x, residual, weight)
    results += comm.all_reduce_rms_norm(x, residual, weight, 1e-3, "two_shot", (torch.empty_like(x), residual))
    results += comm.all_reduce_rms_norm_fp8(x, residual, weight)[:3]
    results += [*comm.all_reduce_rms_norm_fp8(x, residual, weight, scale=given, with_normed=True, algorithm="one_shot")]
    for with_normed in (False, True):
        result = comm.all_reduce_rms_norm_fp8(x, residual, weight, with_normed=with_normed)
        assert (result.normed is None) is not with_normed
        results += [tensor for tensor in result if tensor is not None]
    out = Fp8Normed(*(torch.empty_like(tensor) for tensor in results[-4:]))
    results += comm.all_reduce_rms_norm_fp8(x, residual, weight, 1e-2, None, True, "auto", out)[:3]
    results += [*out]
    results += comm.all_reduce_layer_norm(x, residual, weight)
    results += comm.all_reduce_layer_norm(x, residual, weight.float(), weight.float())
    results += comm.all_reduce_layer_norm_fp8(x, residual, weight, None, 1e-2, given, False)[:3]
    results += comm.all_reduce_layer_norm(
        x, residual, weight, weight, 1e-3, "two_shot", (torch.empty_like(x), residual)
    )
    results += comm.all_reduce_layer_norm_fp8(x, residual, weight, weight)[:3]
    return results


def fused_equals_eager(backend: str) -> int:
    """Compare compiled fused calls with eager ones. Return how many graphs were compiled for two calls."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        call = functools.partial(fused_calls, comm)
        traced = torch.compile(lambda *operands: call(*operands), fullgraph=True, backend=backend)
        for seed in range(2):
            x, residual, weight = (
                values(comm, *shape, seed=seed + number, dtype=torch.bfloat16)
                for number, shape in enumerate([(2 * comm.world_size, 3, 40), (2 * comm.world_size, 3, 40), (40,)])
            )
            there = residual.clone()
            wanted = call(x, residual, weight)
            assert len(wanted) == 37
            assert_same([*traced(x, there, weight), there], [*wanted, residual])
        for text, bad in {
            "a weight of any of these": lambda: comm.all_reduce_rms_norm(x, residual, weight.double()),
            "shapes are": lambda: comm.all_reduce_rms_norm_fp8(x, residual[1:], weight),
            "out is (normed, new_residual)": lambda: comm.all_reduce_rms_norm(x, residual, weight, out=(x,)),
            "out must be": lambda: comm.all_reduce_rms_norm(x, residual, weight, out=(x, None)),
            "must be": lambda: comm.all_reduce_rms_norm(x, residual, weight, out=(x[1:], residual)),
        }.items():
            with pytest.raises(Exception, match=re.escape(text)):
                torch.compile(bad, fullgraph=True, backend=backend)()
        return counters["stats"]["unique_graphs"]


def fused_gradients(backend: str) -> None:
    """Compare the backward of the fused calls, compiled and eager."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n = comm.world_size

        def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            normed, total = comm.all_reduce_rms_norm(x, residual, weight)
            out = torch.empty_like(x), total * 2
            comm.all_reduce_rms_norm(normed, total, weight, out=out)
            normed, total = comm.all_reduce_layer_norm(out[0], out[1], weight, weight.sin())
            return torch.cat([normed * total, *comm.all_reduce_layer_norm(normed.cos(), total, weight)])

        gradients = []
        for run in (call, torch.compile(call, fullgraph=True, backend=backend)):
            leaves = [values(comm, *shape).requires_grad_() for shape in ((2 * n, 3, 8), (2 * n, 3, 8), (8,))]
            result = run(*leaves)
            result.square().sum().backward()
            gradients.append([result, *(leaf.grad for leaf in leaves)])
        for got, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(got, wanted)
        with pytest.raises(Exception, match="x requires grad"):
            torch.compile(lambda x: comm.all_reduce_rms_norm_fp8(x, x, x[0, 0])[2], fullgraph=True, backend=backend)(
                values(comm, 2, 3, 8).requires_grad_()
            )


def order_of_the_program(backend: str) -> list[str]:
    """Check that compiled code keeps the program's order of independent calls, one of whose results is unused.

    Each rank does other work between the calls. Return the calls in order.
    """
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        labels: list[str] = []
        run = comm._run

        def logged(op: Any, *args: Any, **kwargs: Any) -> None:
            labels.append(op.label)
            run(op, *args, **kwargs)

        def call(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if comm.rank == 0:
                early, late = x @ weight, x.abs()
            else:
                early, late = x.abs(), (x @ weight) @ weight
            comm.all_to_all(x)
            first = comm.all_reduce(early)
            comm.barrier()
            whole = comm.all_gather(x)  # a large result that is needed late
            second = comm.all_reduce(first.abs() + late)
            return whole.relu(), comm.reduce_scatter(second).relu()

        weight = values(comm, 6, 6).round()  # whole numbers: products are exact
        traced = torch.compile(call, fullgraph=True, backend=backend)
        comm._run = logged
        comm._prepared.pause()  # calls that are prepared do not pass there
        for seed, requires_grad in ((1, False), (2, True)):
            x = values(comm, 6, 6, seed=seed).round().requires_grad_(requires_grad)
            labels.clear()
            wanted = call(x, weight)
            if requires_grad:
                sum(t.sum() for t in wanted).backward()
            program = list(labels)
            labels.clear()
            got = traced(x, weight)
            if requires_grad:
                sum(t.sum() for t in got).backward()
            assert labels == program, (labels, program)
            assert_same(got, wanted)
        return labels


def graph_arguments() -> None:
    """Check that the graph names the rank and the number of ranks where it depends on them: equal graphs share code."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n, rank = comm.world_size, comm.rank
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return comm.all_gather(x, sizes=[2] * n, sms=5), comm.reduce_scatter(comm.all_gather(x, sms=7))

        torch.compile(call, fullgraph=True, backend=keep)(torch.ones(2, 2))
        arguments = {node.target: node.args[1:] for node in graphs[0].graph.nodes if "shotcast" in str(node.target)}
        ops = torch.ops.shotcast
        assert arguments == {
            ops.all_gather: (comm.name, n, "auto", 7),
            ops.all_gather_uneven: (comm.name, [2] * n, rank, "auto", 5),
            ops.reduce_scatter: (comm.name, n, "auto", "sum", True, None),
        }
        with pytest.raises(shotcast.ConfigError, match="compiled on rank 7"):
            ops.all_gather_uneven(torch.ones(2), comm.name, [2] * n, 7, "auto")


class _Seen(TorchDispatchMode):
    """A dispatch mode that records the names of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "shotcast" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators_and_names(backend: str) -> None:
    """Check that eager calls bypass the operators, that all ranks use the same names, and the error after a close."""
    comm = shotcast.Communicator(device="cpu", timeout_s=300)
    other = comm.split(0)
    half = comm.split(comm.rank)
    assert len({comm.name, other.name, half.name}) == 3
    names = comm._host.all_gather((comm.name, other.name))
    assert names == [names[0]] * comm.world_size
    x = torch.ones(4)
    with _Seen() as seen:
        comm.all_reduce(x)
        comm.all_reduce(x.clone().requires_grad_()).sum().backward()
        assert seen.names == []
        torch.ops.shotcast.all_reduce(x, comm.name, "auto", "sum")
        assert seen.names == ["shotcast.all_reduce.default"]
    # A compiler may choose the strides of a tensor.
    y = values(comm, 4, 3)
    assert_same([torch.ops.shotcast.all_reduce(y.t(), comm.name, "auto", "sum")], [comm.all_reduce(y.t().contiguous())])

    def call(c: Communicator, x: torch.Tensor) -> torch.Tensor:
        return c.all_reduce(x)

    traced = torch.compile(call, fullgraph=True, backend=backend)
    assert traced(comm, x).tolist() == [float(comm.world_size)] * 4
    assert traced(half, x).tolist() == [1.0] * 4  # a communicator of other ranks needs another graph
    assert traced(comm, x).tolist() == [float(comm.world_size)] * 4
    other.close()
    with pytest.raises(shotcast.ClosedError, match="all_reduce: this communicator was closed"):
        traced(other, x)
    comm.close()
    with pytest.raises(shotcast.ClosedError, match="all_reduce: this communicator was closed"):
        traced(comm, x)
    name = half.name
    half.close()
    del half
    with pytest.raises(shotcast.ConfigError, match=f"no communicator of this process is called '{name}'"):
        torch.ops.shotcast.all_reduce(x, name, "auto", "sum")


def bad_calls(backend: str) -> None:
    """Check that calls that are refused eagerly are also refused when traced or compiled, with the same text."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        n = comm.world_size
        x = torch.ones(2 * n, 3)
        for text, call in {
            "x is not contiguous": lambda x: comm.broadcast(x.t(), 0),
            "out must be": lambda x: comm.all_reduce(x, out=torch.empty(3)),
            "out must be ": lambda x: comm.all_gather(x, out=torch.empty(3)),
            "divided among": lambda x: comm.reduce_scatter(x[1:]),
            "root is a rank": lambda x: comm.broadcast(x, n),
            "cannot send to itself": lambda x: comm.send(x, comm.rank),
            "sizes must hold": lambda x: comm.all_gather(x, sizes=[1]),
            "unknown algorithm 'tree'": lambda x: comm.all_reduce(x, algorithm="tree"),
            "unknown reduction 'mean'": lambda x: comm.all_reduce(x, reduction="mean"),
        }.items():
            with pytest.raises(Exception, match=text.strip()) as eager:
                call(x)
            assert isinstance(eager.value, shotcast.ConfigError)
            with pytest.raises(Exception, match=text.strip()):
                torch.compile(call, fullgraph=True, backend=backend)(x)
        assert torch.equal(comm.all_reduce(x), n * x)


def checkpointed(backend: str) -> None:
    """Check a checkpointed block whose backward recomputes all but the collectives, which are kept."""
    with shotcast.Communicator(device="cpu", timeout_s=300) as comm:
        block = Block(comm, 8)
        kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.shotcast.all_reduce.default])

        def call(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(block, x, use_reentrant=False, context_fn=kept)

        x = torch.ones(3, 8)
        traced = torch.compile(call, fullgraph=True, backend=backend)
        grads = []
        for run in (block, traced):
            block.zero_grad()
            run(x).square().sum().backward()
            grads.append([parameter.grad.clone() for parameter in block.parameters()])
        assert_same(*grads)


def error_without(what: str) -> str:
    """Compile with a PyTorch that lacks a private part on which the order of calls depends. Return the error."""
    import torch._inductor.lowering
    from torch._inductor import ir

    if what == "Inductor's kernels":
        del ir.EffectfulKernel
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        x = torch.ones(3)
        assert comm.all_reduce(x).tolist() == [1.0] * 3
        with pytest.raises(Exception, match="PyTorch") as caught:
            torch.compile(lambda x: comm.all_reduce(x), fullgraph=True, backend="aot_eager")(x)
        return str(caught.value)
