"""Functions that the ranks of tests/collectives/test_autograd.py run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shotcast
from shotcast import Communicator
from shotcast.collectives.norm_operands import Fp8Normed


def rank_tensors(comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return every rank's tensor. The values are small integers, so sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for _ in range(comm.world_size)]


def analytic(dtypes: list[torch.dtype]) -> int:
    """Compare gradients of L = sum_r <weight_r, y_r> with the transposed maps, written out.

    Return the number of cases.
    """
    done = 0
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        for dtype in dtypes:
            own = ["auto", "one_shot", "two_shot", "ring"] if dtype is not torch.float64 else ["auto", "vendor"]
            for algorithm in own:
                x = rank_tensors(comm, (2 * size, 3), dtype, 1)[rank].requires_grad_()
                weights = rank_tensors(comm, (2 * size, 3), dtype, 2)
                y = comm.all_reduce(x, algorithm=algorithm)
                assert torch.equal(y, torch.stack(rank_tensors(comm, (2 * size, 3), dtype, 1)).sum(0))
                (y * weights[rank]).sum().backward()
                assert torch.equal(x.grad, torch.stack(weights).sum(0)), (dtype, algorithm, "all_reduce")
                done += 1
            for algorithm in [name for name in own if name != "two_shot"]:
                x = rank_tensors(comm, (2 * size, 3), dtype, 1)[rank].requires_grad_()
                weights = rank_tensors(comm, (2, 3), dtype, 2)
                (comm.reduce_scatter(x, algorithm=algorithm) * weights[rank]).sum().backward()
                assert torch.equal(x.grad, torch.cat(weights)), (dtype, algorithm, "reduce_scatter")
                done += 1
            for algorithm in ("auto", "one_shot", "ring", "vendor"):
                x = rank_tensors(comm, (2, 3), dtype, 1)[rank].requires_grad_()
                weights = rank_tensors(comm, (2 * size, 3), dtype, 2)
                (comm.all_gather(x, algorithm=algorithm) * weights[rank]).sum().backward()
                assert torch.equal(x.grad, torch.stack(weights).sum(0)[2 * rank : 2 * rank + 2]), (dtype, algorithm)
                done += 1
                x = rank_tensors(comm, (2 * size, 3), dtype, 1)[rank].requires_grad_()
                weights = rank_tensors(comm, (2 * size, 3), dtype, 2)
                (comm.all_to_all(x, algorithm="auto") * weights[rank]).sum().backward()
                assert torch.equal(x.grad, torch.cat([w.chunk(size)[rank] for w in weights])), (dtype, "all_to_all")
            lengths = [2 * r + (r == size - 1) for r in range(size)]  # rank 0 gives nothing
            start = sum(lengths[:rank])
            for algorithm in ("auto", "one_shot", "vendor"):
                x = torch.ones(lengths[rank], 3, dtype=dtype, requires_grad=True)
                weights = rank_tensors(comm, (sum(lengths), 3), dtype, 3)
                (comm.all_gather(x, sizes=lengths, algorithm=algorithm) * weights[rank]).sum().backward()
                wanted = torch.stack(weights).sum(0)[start : start + lengths[rank]]
                assert torch.equal(x.grad, wanted), (dtype, algorithm, "uneven")
                done += 1
    return done


def conjugated() -> None:
    """Check complex gradients that autograd conjugates lazily."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for op in (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.all_to_all):
            gradients = []
            for lazily in (True, False):
                x = (torch.arange(4.0) + 1j * comm.rank).requires_grad_()
                y = op(x)
                weight = torch.arange(len(y)) * (1 + 2j)
                (y.conj() * weight if lazily else y.conj().resolve_conj() * weight).sum().abs().backward()
                gradients.append(x.grad)
            assert torch.equal(*gradients)
            assert gradients[0].abs().max() > 0
            y = op(x.detach().requires_grad_())
            y.conj().backward(torch.ones(y.shape, dtype=y.dtype))


def numeric() -> int:
    """Compare gradients of L = sum_r sin(y_r) . weight_r with central differences, in float64.

    Return the number of comparisons.
    """
    done = 0
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        lengths = [r + 1 for r in range(size)]
        calls = {
            "all_reduce": (comm.all_reduce, (size, 2)),
            "reduce_scatter": (comm.reduce_scatter, (size, 2)),
            "all_gather": (comm.all_gather, (2, 2)),
            "all_to_all": (comm.all_to_all, (size, 2)),
            "uneven": (lambda t: comm.all_gather(t, sizes=lengths), (rank + 1, 2)),
        }
        generator = torch.Generator().manual_seed(rank)
        for name, (call, shape) in calls.items():
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            weight = torch.randn(call(x).shape, generator=generator, dtype=torch.float64)

            def loss(x: torch.Tensor, call=call, weight=weight) -> torch.Tensor:
                """Return the loss of all ranks together, on every rank."""
                return comm.all_reduce((call(x).sin() * weight).sum().detach())

            y = x.clone().requires_grad_()
            (call(y).sin() * weight).sum().backward()
            # Every rank in turn perturbs one of its elements. All ranks take part in each evaluation.
            for mover in range(size):
                at = torch.zeros_like(x)
                if rank == mover:
                    at.view(-1)[-1] = 1e-5
                slope = float(loss(x + at) - loss(x - at)) / 2e-5
                if rank == mover:
                    assert abs(slope - float(y.grad.view(-1)[-1])) < 1e-8, (name, slope, y.grad)
                    done += 1
    return done


def second_derivative() -> None:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        n = comm.world_size
        x = torch.ones(2 * n, requires_grad=True)
        with torch.no_grad():
            assert not comm.all_reduce(x).requires_grad
        assert not comm.all_reduce(x.detach()).requires_grad
        # The second derivative of a linear map's square goes through the backward's own collective.
        (first,) = torch.autograd.grad(comm.all_reduce(x).square().sum(), x, create_graph=True)
        assert first.requires_grad
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second.tolist() == [2.0 * n**2] * x.numel()
        # The gradient arrives expanded or transposed.
        z = torch.ones(comm.world_size, 3, requires_grad=True)
        comm.all_reduce(z).t().sum().backward()
        assert z.grad.tolist() == [[float(comm.world_size)] * 3] * comm.world_size


def budgets_of_gradients() -> None:
    """Record the numbers of SMs that forward and backward are given, of calls and of operators in a graph."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        given: list[int | None] = []
        run = comm._run

        def recorded(*args: Any, sms: int | None = None, **fields: Any) -> Any:
            given.append(sms)
            return run(*args, sms=sms, **fields)

        comm._run = recorded  # type: ignore[method-assign]
        x = torch.ones(4, requires_grad=True)
        for reduction in ("sum", "max", "min", "prod"):
            for made in (
                lambda by: comm.all_reduce(x, reduction=by, sms=3),
                lambda by: comm.reduce_scatter(x, reduction=by, sms=3),
                lambda by: torch.ops.shotcast.all_reduce(x, comm.name, "auto", by, 3),
                lambda by: torch.ops.shotcast.reduce_scatter(x, comm.name, 1, "auto", by, True, 3),
            ):
                before = len(given)
                torch.autograd.grad(made(reduction).sum(), x)
                assert len(given) - before == (2 if reduction == "sum" else 3), (reduction, given[before:])
        assert set(given) == {3}


def tensor_parallel() -> None:
    """Gather the columns of a weight from all ranks, and compare the gradient with that of the whole weight."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(5, 2 * size, generator=generator, dtype=torch.float64)
        batch = torch.randn(3 * size, 5, generator=generator, dtype=torch.float64)
        # Every rank computes the whole loss, so each contributes its share of it.
        columns = weight.chunk(size, 1)[rank].clone().requires_grad_()
        parts = comm.all_gather((batch @ columns).t().contiguous())
        (parts.square().sum() / size).backward()
        whole = weight.clone().requires_grad_()
        (batch @ whole).square().sum().backward()
        torch.testing.assert_close(columns.grad, whole.grad.chunk(size, 1)[rank])


def reduced_in_place() -> None:
    """Compare the gradients of reduce in place, for every reduction and root, with plain PyTorch."""
    reductions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda parts: parts.sum(0),
        "avg": lambda parts: parts.mean(0),
        "max": lambda parts: parts.amax(0),
        "min": lambda parts: parts.amin(0),
        "prod": lambda parts: parts.prod(0),
    }
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for root, (name, plain) in itertools.product(range(comm.world_size), reductions.items()):
            xs = [x.requires_grad_() for x in rank_tensors(comm, (4, 3), torch.float64, 5)]
            weight = torch.arange(12.0).view(4, 3)
            wanted = torch.autograd.grad((plain(torch.stack([x * 2 for x in xs])) * weight).sum(), xs)[comm.rank]
            x = xs[comm.rank].detach().clone().requires_grad_()
            y = x * 2
            got = comm.reduce(y, root, out=y, reduction=name)
            assert (got is y) == (comm.rank == root)
            (got * (weight if comm.rank == root else 1)).sum().backward()
            torch.testing.assert_close(x.grad, wanted, rtol=0, atol=0, msg=name)


def forgotten_histories() -> None:
    """Check that constants written over a tensor leave no gradient for what it was computed from."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        ones, right, left = torch.ones(size, 3), (rank + 1) % size, (rank - 1) % size
        for call, given in ((comm.reduce, ones), (comm.gather, ones[:1])):
            for root in range(size):
                x = torch.ones(size, 3, requires_grad=True)
                y = x * 2
                assert (call(given, root, out=y) is y) == (rank == root)
                y.sum().backward()
                left_alone = rank != root  # of other ranks, out is not used
                assert torch.equal(x.grad, torch.full((size, 3), 2.0 * left_alone)), (call, root)
        for root in range(size):
            for given in (ones, ones if rank == root else None):
                x = torch.ones(1, 3, requires_grad=True)
                y = x * 2
                assert comm.scatter(given, root, out=y) is y
                y.sum().backward()
                assert torch.equal(y, ones[:1])
                assert torch.equal(x.grad, torch.zeros(1, 3)), ("scatter", root)
        x = torch.ones(3, requires_grad=True)
        y, z = x * 2, torch.zeros(3)
        messages = [(ones[0] * 5, right), (ones[0] * 7, right)]
        came = comm.batch_send_recv(messages, [(y, left), (z, left)])
        assert came[0] is y
        assert came[1] is z
        assert (y[0].item(), z[0].item()) == (5.0, 7.0)
        y.sum().backward()
        assert torch.equal(x.grad, torch.zeros(3))


Write = Callable[[Communicator, torch.Tensor], object]

WRITES: dict[str, Write] = {
    "all_reduce": lambda comm, y: comm.all_reduce(torch.ones_like(y), out=y),
    "all_reduce in place": lambda comm, y: comm.all_reduce(y, out=y),
    "maximum": lambda comm, y: comm.all_reduce(torch.ones_like(y), out=y, reduction="max"),
    "vendor": lambda comm, y: comm.all_reduce(y, out=y, algorithm="vendor"),
    "reduce_scatter": lambda comm, y: comm.reduce_scatter(torch.ones(comm.world_size * len(y), 8), out=y),
    "all_gather": lambda comm, y: comm.all_gather(torch.ones(len(y) // comm.world_size, 8), out=y),
    "uneven": lambda comm, y: comm.all_gather(
        torch.ones(len(y) if comm.rank == 0 else 0, 8), out=y, sizes=[len(y)] + [0] * (comm.world_size - 1)
    ),
    "all_to_all": lambda comm, y: comm.all_to_all(torch.ones_like(y), out=y),
    "broadcast": lambda comm, y: comm.broadcast(y, 0),
    "normed": lambda comm, y: comm.all_reduce_rms_norm(
        torch.ones_like(y), torch.ones_like(y), torch.ones(8), out=(y, y.new_empty(y.shape))
    ),
    "new_residual": lambda comm, y: comm.all_reduce_rms_norm(
        torch.ones_like(y), torch.ones_like(y), torch.ones(8), out=(y.new_empty(y.shape), y)
    ),
}
"""Calls that write a tensor [N * k, 8]."""


def raised_versions() -> None:
    """Check that each write raises the version, of views too, and that a backward that needs the old values fails.

    The calls are those that autograd does not see, and those that it records.
    """
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for name, write in WRITES.items():
            y = torch.ones(2 * comm.world_size, 8)
            view, before = y.view(-1), y._version
            write(comm, y)
            assert y._version == view._version > before, name
            before = y._version
            write(comm, y.detach())
            assert y._version > before, name
            before = y._version
            write(comm, y.data)
            assert y._version == before, name
            for requires_grad in (False, True):
                factor = torch.ones(8, requires_grad=True)
                y = torch.ones(2 * comm.world_size, 8, requires_grad=requires_grad) * 1
                saved = (y * factor).sum()
                write(comm, y)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    saved.backward()
        with torch.inference_mode():
            for write in WRITES.values():
                write(comm, torch.ones(2 * comm.world_size, 8))
        x, residual, weight = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)
        out = comm.all_reduce_rms_norm_fp8(x, residual, weight, with_normed=True)
        before = [tensor._version for tensor in out]
        comm.all_reduce_rms_norm_fp8(x, residual, weight, with_normed=True, out=out)
        assert [tensor._version for tensor in out] == [version + 1 for version in before]
        comm.all_reduce_rms_norm_fp8(x, residual, weight, scale=torch.ones(()), out=out)
        assert [tensor._version for tensor in out] == [
            version + more for version, more in zip(before, (2, 1, 2, 1), strict=True)
        ]


def received_versions() -> None:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for algorithm in ("auto", "empty"):
            x = torch.ones(4 if algorithm == "auto" else 0)
            before = x._version
            if comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
            assert x._version == before + comm.rank


def refused_leaves() -> int:
    """Check that each write refuses the tensors that PyTorch refuses, with its error, before any communication.

    Return the number of refusals.
    """
    refused = 0
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        leaf = torch.ones(2 * comm.world_size, 8, requires_grad=True)
        writes = WRITES | {"recv": lambda comm, y: comm.recv(y, 1 - comm.rank)}
        for name, write in writes.items():
            for tensor in (leaf, leaf.view(leaf.shape), leaf[:]):
                with pytest.raises(RuntimeError) as of_pytorch:
                    tensor.add_(1)
                with pytest.raises(type(of_pytorch.value)) as ours:
                    write(comm, tensor)
                assert isinstance(ours.value, shotcast.ConfigError)
                _, _, text = str(ours.value).partition(": ")  # after the name of the method
                assert text.startswith(str(of_pytorch.value).rstrip(".")), (name, str(ours.value))
                refused += 1
            assert leaf._version == 0, name
        for write in WRITES.values():
            before = leaf._version
            with torch.no_grad():
                write(comm, leaf)
            assert leaf._version > before
            assert leaf.is_leaf
            assert leaf.requires_grad
    return refused


def norm_gradients() -> None:
    """Compare the gradients of the fused calls with those of plain PyTorch, of all ranks' rows in one process."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size, eps = comm.rank, comm.world_size, 1e-2
        generator = torch.Generator().manual_seed(7)

        def leaves(count: int, *shape: int) -> list[torch.Tensor]:
            return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(count)]

        def losses(normed: torch.Tensor, new_residual: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
            return (normed.sin() * weights[0]).sum() + (new_residual * weights[1]).sum()

        functional = torch.nn.functional
        rows = 2 * size
        for layer in (False, True):
            for with_out in (False, True):
                xs, residuals, gains = leaves(size, rows, 3, 8), leaves(size, rows, 3, 8), leaves(size, 8)
                biases = leaves(size, 8) if layer else []
                weights = leaves(2 * size, rows, 3, 8)
                total = sum(xs)
                parts = [total + residual for residual in residuals]
                if layer:
                    normed = [
                        functional.layer_norm(part, (8,), gains[r], biases[r], eps) for r, part in enumerate(parts)
                    ]
                else:
                    normed = [functional.rms_norm(part, (8,), gains[r], eps) for r, part in enumerate(parts)]
                loss = sum(losses(normed[r], parts[r], weights[r::size]) for r in range(size))
                mine = [xs[rank], residuals[rank], gains[rank], *biases[rank : rank + 1]]
                wanted = torch.autograd.grad(loss, mine, create_graph=True)
                wanted += torch.autograd.grad(
                    sum(
                        g.square().sum()
                        for g in torch.autograd.grad(loss, [*xs, *residuals, *gains, *biases], create_graph=True)
                    ),
                    mine,
                )
                out = (torch.empty_like(normed[rank]), residuals[rank] * 1) if with_out else None
                if with_out:
                    out = (out[0].detach(), out[1])
                call = comm.all_reduce_layer_norm if layer else comm.all_reduce_rms_norm
                got = call(*mine, eps, out=out)
                if out is not None:
                    assert got[0] is out[0]
                    assert got[1] is out[1]
                first = torch.autograd.grad(losses(*got, weights[rank::size]), mine, create_graph=True)
                second = torch.autograd.grad(sum(g.square().sum() for g in first), mine)
                for ours, plain in zip((*first, *second), wanted, strict=True):
                    torch.testing.assert_close(ours, plain, rtol=2e-4, atol=2e-4)
        x, residual, weight = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)
        gain = weight.clone().requires_grad_()
        for call in (comm.all_reduce_rms_norm, comm.all_reduce_layer_norm):
            call(x.bfloat16(), residual.bfloat16(), gain)[0].float().sum().backward()
            assert gain.grad.dtype == torch.float32
        with pytest.raises(shotcast.UnsupportedError, match="bias requires grad"):
            comm.all_reduce_layer_norm_fp8(x, residual, weight, gain)
        for number in range(3):
            operands = [tensor.clone().requires_grad_(number == n) for n, tensor in enumerate((x, residual, weight))]
            with pytest.raises(
                shotcast.UnsupportedError, match=r"has no derivative, and (x|residual|weight) requires grad"
            ):
                comm.all_reduce_rms_norm_fp8(*operands)
            with torch.no_grad():
                comm.all_reduce_rms_norm_fp8(*operands)
        history = residual.requires_grad_() * 1
        out = Fp8Normed(*comm.all_reduce_rms_norm_fp8(x, residual.detach(), weight)[:2], history, None)
        with pytest.raises(shotcast.UnsupportedError, match="new_residual requires grad"):
            comm.all_reduce_rms_norm_fp8(x, residual.detach(), weight, out=out)
