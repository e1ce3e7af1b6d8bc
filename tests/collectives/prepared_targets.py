"""Functions that the ranks of tests/collectives/test_prepared.py run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shotcast
from frames import Frames
from shotcast.collectives.norm_operands import Fp8Normed

HIDDEN = 48
Call = Callable[[shotcast.Communicator, Callable[..., torch.Tensor], bool], Any]
"""Makes a call, on tensors that the second argument makes of a shape; the third says that it gives the outputs too."""


def _summed(**named: Any) -> Call:
    return lambda comm, new, given: comm.all_reduce(x := new(6, 4), out=torch.empty_like(x) if given else None, **named)


def _in_place(comm: shotcast.Communicator, new: Callable[..., torch.Tensor], given: bool) -> Any:
    x = new(6, 4)
    return comm.all_reduce(x, out=x if given else x.view_as(x))


def _message(comm: shotcast.Communicator, new: Callable[..., torch.Tensor], given: bool) -> Any:
    x = new(6, 4)
    if comm.rank > 1:
        return None
    return comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)


def _rooted(op: str, shape: Callable[[int], int], out_shape: Callable[[int], int], root: int) -> Call:
    def call(comm: shotcast.Communicator, new: Callable[..., torch.Tensor], given: bool) -> Any:
        x, size = new(2 * shape(comm.world_size), 4), comm.world_size
        out = torch.empty(2 * out_shape(size), 4) if given else None
        return getattr(comm, op)(x, root, out=out)

    return call


def _fused(op: str, fp8: bool, layer: bool, **named: Any) -> Call:
    def call(comm: shotcast.Communicator, new: Callable[..., torch.Tensor], given: bool) -> Any:
        rows = 2 * comm.world_size
        x, residual = new(rows, HIDDEN), new(rows, HIDDEN)
        affine = [new(HIDDEN)] * 1 + ([new(HIDDEN)] if layer else [])
        out: Any = None
        if given:
            normed, new_residual = torch.empty(rows, HIDDEN), residual
            out = normed, new_residual
            if fp8:
                quantized = torch.empty(rows, HIDDEN, dtype=torch.float8_e4m3fn)
                out = Fp8Normed(quantized, torch.empty(rows, 1), new_residual, normed)
        return getattr(comm, op)(x, residual, *affine, out=out, **named)

    return call


CALLS: dict[str, Call] = {
    "all_reduce": _summed(),
    "all_reduce max": _summed(reduction="max"),
    "all_reduce of few SMs": _summed(sms=4),
    "all_reduce in place": _in_place,
    "reduce_scatter": lambda comm, new, given: comm.reduce_scatter(
        new(2 * comm.world_size, 4), out=torch.empty(2, 4) if given else None
    ),
    "all_gather": lambda comm, new, given: comm.all_gather(
        new(2, 4), out=torch.empty(2 * comm.world_size, 4) if given else None
    ),
    "all_gather of sizes": lambda comm, new, given: comm.all_gather(
        new(2, 4), out=torch.empty(2 * comm.world_size, 4) if given else None, sizes=[2] * comm.world_size
    ),
    "all_to_all": lambda comm, new, given: comm.all_to_all(
        x := new(2 * comm.world_size, 4), out=torch.empty_like(x) if given else None
    ),
    "broadcast": lambda comm, new, given: comm.broadcast(new(6, 4), comm.world_size - 1),
    "reduce": _rooted("reduce", lambda size: 1, lambda size: 1, 0),
    "gather": _rooted("gather", lambda size: 1, lambda size: size, 1),
    "scatter": _rooted("scatter", lambda size: size, lambda size: 1, 0),
    "barrier": lambda comm, new, given: comm.barrier(),
    "send and recv": _message,
    "all_reduce_rms_norm": _fused("all_reduce_rms_norm", False, False),
    "all_reduce_rms_norm_fp8": _fused("all_reduce_rms_norm_fp8", True, False),
    "all_reduce_rms_norm_fp8 with normed": _fused("all_reduce_rms_norm_fp8", True, False, with_normed=True),
    "all_reduce_rms_norm_fp8 by a scale": _fused("all_reduce_rms_norm_fp8", True, False, scale=torch.tensor(0.25)),
    "all_reduce_layer_norm": _fused("all_reduce_layer_norm", False, True),
    "all_reduce_layer_norm_fp8": _fused("all_reduce_layer_norm_fp8", True, True),
}


def _maker(seed: int, rank: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return lambda *shape: torch.randn(*shape, generator=generator)


def frames() -> dict[str, list[str]]:
    """Return the functions that each call runs when it is repeated on other tensors."""
    found = {}
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm, Frames() as counted:
        for name, call in CALLS.items():
            if name == "send and recv" and comm.rank > 1:
                continue
            for given in (True, False):
                for seed in range(2):
                    call(comm, _maker(seed, comm.rank), given)
                found[f"{name}, given: {given}"] = counted.of(lambda: call(comm, _maker(2, comm.rank), given))  # noqa: B023
    return found


def _values(result: Any) -> list[torch.Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [x.view(torch.uint8) if x.element_size() == 1 else x for x in results if isinstance(x, torch.Tensor)]


def same_bits() -> None:
    """Compare calls that are repeated with those of a communicator that prepares none."""
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm, comm.split(0) as other:  # type: ignore[union-attr]
        assert other is not None
        other._prepared.keep = lambda *arguments: None  # type: ignore[method-assign]
        for name, call in CALLS.items():
            for given in (True, False):
                for seed in range(4):
                    got, wanted = (_values(call(one, _maker(seed, comm.rank), given)) for one in (comm, other))
                    assert len(got) == len(wanted), name
                    assert all(map(torch.equal, got, wanted)), (name, given, seed)
                    assert [x.dtype for x in got] == [x.dtype for x in wanted]


def after_trouble() -> None:
    """Make calls that the prepared ones do not match, and those of a communicator that is closed or stopped."""
    comm = shotcast.Communicator(device="cpu", timeout_s=100)
    x, weight = torch.ones(4, HIDDEN), torch.ones(HIDDEN)
    for _ in range(3):
        comm.all_reduce_rms_norm(x, x.clone(), weight, out=(torch.empty_like(x), torch.empty_like(x)))
        comm.broadcast(x, 1)
        comm.all_reduce(x, sms=16)
    leaf = weight.clone().requires_grad_()
    normed, _ = comm.all_reduce_rms_norm(x, x.clone(), leaf)
    normed.sum().backward()
    assert leaf.grad is not None
    residual = x.clone()
    for wrong, words in (
        (lambda: comm.broadcast(x, 1.0), "root is a rank"),  # type: ignore[arg-type]
        (lambda: comm.all_reduce(x, sms=16.0), "sms is a whole number"),  # type: ignore[arg-type]
        (lambda: comm.all_reduce_rms_norm(x, residual, weight, out=(x, x)), "one tensor"),
        (lambda: comm.all_reduce_rms_norm(x, residual, weight, out=(residual, x)), "apart"),
        (lambda: comm.all_reduce_rms_norm(x, residual, weight, out=[x, x]), "out is"),  # type: ignore[arg-type]
        (lambda: comm.all_reduce_rms_norm(x, residual, weight.double()), "weight"),
        (lambda: comm.all_reduce_rms_norm(x, residual[:2], weight), "shapes are"),
        (lambda: comm.all_reduce_rms_norm(x, torch._neg_view(residual), weight), "negated lazily"),
        (lambda: comm.all_reduce_rms_norm(x, residual, weight, eps=-1.0), "eps is a number"),
        (lambda: comm.all_reduce_rms_norm(x, residual.to_sparse(), weight), "not contiguous"),
    ):
        try:
            wrong()
        except shotcast.ConfigError as error:
            assert words in str(error), error  # noqa: PT017
        except shotcast.UnsupportedError as error:
            assert words in str(error), error  # noqa: PT017
        else:
            raise AssertionError(f"it was not refused: {words}")
    if comm.rank == 0:  # the other comes too late
        comm.set_timeout(0.5)
        try:
            comm.broadcast(x, 1)
        except shotcast.CollectiveTimeout as error:
            first = error
        for repeated in (lambda: comm.broadcast(x, 1), lambda: comm.all_reduce_rms_norm(x, residual, weight)):
            try:
                repeated()
            except shotcast.CollectiveTimeout as error:
                assert error is not first  # noqa: PT017
            else:
                raise AssertionError("a call was made after a fault")
    comm.close()
    for repeated in (lambda: comm.broadcast(x, 1), lambda: comm.all_reduce_rms_norm(x, residual, weight)):
        try:
            repeated()
        except shotcast.ClosedError:
            continue
        raise AssertionError("a call was made after the communicator was closed")
