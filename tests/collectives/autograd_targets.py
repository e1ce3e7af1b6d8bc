"""Functions that the ranks of tests/collectives/test_autograd.py run."""

from __future__ import annotations

import torch

import shotcast
from shotcast import Communicator


def rank_tensors(comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return every rank's tensor. The values are small integers, so sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for _ in range(comm.world_size)]


def analytic(dtypes: list[torch.dtype]) -> int:
    """Compare gradients of L = sum_r <weight_r, y_r> with the transposed maps, written out.

    Return the number of cases.
    """
    done = 0
    with shotcast.Communicator(device="cpu", timeout_s=20) as comm:
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
    with shotcast.Communicator(device="cpu", timeout_s=20) as comm:
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
    with shotcast.Communicator(device="cpu", timeout_s=20) as comm:
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


def require_grad_of_results() -> None:
    with shotcast.Communicator(device="cpu", timeout_s=20) as comm:
        x = torch.ones(2 * comm.world_size, requires_grad=True)
        n = comm.world_size
        out = torch.empty(2 * n)
        with torch.no_grad():
            assert not comm.all_reduce(x).requires_grad
        assert not comm.all_reduce(x.detach()).requires_grad
        assert not comm.all_reduce(x, out=out).requires_grad
        assert not comm.all_reduce(x, reduction="max").requires_grad
        for algorithm in ("auto", "vendor"):
            assert not comm.all_reduce(x, out=torch.empty(2 * n), algorithm=algorithm).requires_grad
            assert not comm.reduce_scatter(x, out=torch.empty(2), algorithm=algorithm).requires_grad
            assert not comm.all_gather(x, out=torch.empty(2 * n * n), algorithm=algorithm).requires_grad
            assert not comm.all_to_all(x, out=torch.empty(2 * n), algorithm=algorithm).requires_grad
            for call in (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.all_to_all):
                assert call(x, algorithm=algorithm).requires_grad
        normed, total = comm.all_reduce_rms_norm(x, x, torch.ones_like(x, requires_grad=True))
        assert not normed.requires_grad
        assert not total.requires_grad
        # The second derivative of a linear map's square goes through the backward's own collective.
        (first,) = torch.autograd.grad(comm.all_reduce(x).square().sum(), x, create_graph=True)
        assert first.requires_grad
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second.tolist() == [2.0 * n**2] * x.numel()
        # The gradient arrives expanded or transposed.
        z = torch.ones(comm.world_size, 3, requires_grad=True)
        comm.all_reduce(z).t().sum().backward()
        assert z.grad.tolist() == [[float(comm.world_size)] * 3] * comm.world_size


def tensor_parallel() -> None:
    """Gather the columns of a weight from all ranks, and compare the gradient with that of the whole weight."""
    with shotcast.Communicator(device="cpu", timeout_s=20) as comm:
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
