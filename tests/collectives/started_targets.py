"""Functions that a CPU rank of test_started.py runs."""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import Any

import pytest
import torch

import shotcast
from shotcast.errors import ConfigError


def messages() -> None:
    """Start messages of both directions at once, in an order in which single ones would wait for each other."""
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        x, y = torch.full((300_000,), float(comm.rank)), torch.empty(300_000)
        peer = 1 - comm.rank
        for call, tensor in (("recv", y), ("send", x)):
            with pytest.raises(ConfigError, match=f"a {call} cannot be started.*start a batch_send_recv"):
                comm.start(call, tensor, peer)
        handle = comm.start("batch_send_recv", [(x, peer)], [(y, peer)])
        assert handle.wait()[0][-1] == peer


def changed_lists() -> None:
    """Change lists after a start and before the thread makes the call, and compare the results."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        size, peer = comm.world_size, 1 - comm.rank
        xs = [torch.ones(4), torch.full((3,), 2.0)]
        outs, first = [torch.empty(4), torch.empty(3)], xs[0]
        kept = list(outs)
        sends, recvs = [(first, peer)], [(torch.empty(4), peer)]
        sizes = [1, 1]
        if comm.rank:  # so that calls of the other wait, while it changes its lists
            time.sleep(0.2)
        comm.start("barrier")
        handles = [
            comm.start("all_reduce_coalesced", xs, outs=outs),
            comm.start("batch_send_recv", sends, recvs),
            comm.start("all_to_all", torch.arange(2.0), input_sizes=sizes, output_sizes=sizes),
        ]
        for values in (xs, outs, sends, recvs, sizes):
            values.clear()  # type: ignore[attr-defined]
        found = [handle.wait() for handle in handles]
        assert [one is other for one, other in zip(found[0], kept, strict=True)] == [True, True]
        assert [one[0].item() for one in kept] == [size, 2.0 * size]
        assert found[1][0].tolist() == [1.0] * 4
        assert found[2].tolist() == [float(comm.rank)] * 2


def shown() -> None:
    """Print handles of calls that are under way, over, and refused."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        begin = threading.Event()
        comm.start("barrier").wait()
        comm._starter.start(begin.wait, ())  # type: ignore[union-attr]  # so that the next call cannot end
        handle, refused = comm.start("all_reduce", torch.ones(3)), comm.start("broadcast", torch.ones(3), 9)
        assert repr(handle) == "Handle(all_reduce, under way)"
        begin.set()
        handle.wait()
        assert repr(handle) == "Handle(all_reduce, over)"
        with pytest.raises(ConfigError):
            refused.wait()
        assert repr(refused) == "Handle(broadcast, failed with ConfigError)"


def layer_norms() -> None:
    """Start each call with a LayerNorm, and compare it with the same call made."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        x = torch.rand(2 * comm.world_size, 16)
        residual, weight, bias = torch.rand_like(x), torch.rand(16), torch.rand(16)
        for call in ("all_reduce_layer_norm", "all_reduce_layer_norm_fp8"):
            _same(comm, call, x, residual, weight, bias)


def _same(comm: shotcast.Communicator, call: str, *operands: torch.Tensor) -> None:
    started = comm.start(call, *(x.clone() for x in operands)).wait()
    made = getattr(comm, call)(*(x.clone() for x in operands))
    for got, wanted in zip(started, made, strict=True):
        assert (got is None) == (wanted is None), call
        assert got is None or torch.equal(got.float(), wanted.float()), call


def _threads() -> list[Any]:
    return [thread for thread in threading.enumerate() if thread.name == "shotcast started calls"]


def never_closed() -> int:
    """Drop a communicator that has started calls without closing it. Return how many threads are left."""
    gc.collect()
    before = _threads()
    comm: Any = shotcast.Communicator(device="cpu", timeout_s=100)
    comm.start("barrier").wait()
    (thread,) = [one for one in _threads() if one not in before]
    del comm
    gc.collect()
    thread.join(60)
    return thread.is_alive()


def dropped_errors() -> list[str]:
    """Drop handles of calls that fail and of one that does not. Return what was logged."""
    logged: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    log, kept = logging.getLogger("shotcast.collectives.started"), Kept()
    log.addHandler(kept)
    try:
        with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
            wrong = torch.ones(comm.world_size + 1)
            handle = comm.start("reduce_scatter", wrong)
            with pytest.raises(ConfigError):
                handle.wait()
            handle = comm.start("reduce_scatter", wrong)  # the handle before has given its error
            while not handle.is_completed():
                time.sleep(0.001)
            del handle  # after the call
            comm.start("reduce_scatter", wrong)  # dropped at once
            comm.start("barrier")
            comm.barrier()
    finally:
        log.removeHandler(kept)
    return logged


def apart() -> None:
    """Write to results of coalesced calls, which are apart for autograd, and differentiate what was made of others."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        size = comm.world_size
        totals = {"all_reduce_coalesced": size, "all_gather_coalesced": 1, "reduce_scatter_coalesced": size}
        for call, total in totals.items():
            for differentiated in (False, True):
                for count in (1, 3):
                    leaf = torch.ones(2 * size, requires_grad=differentiated)
                    weight = torch.ones(1, requires_grad=True)
                    results = getattr(comm, call)([leaf * 1 for _ in range(count)])
                    products = [result * weight for result in results[1:]]
                    results[0].add_(1)
                    assert results[0].tolist() == [total + 1.0] * len(results[0]), call
                    whole = sum((product.sum() for product in products), results[0].sum() * weight)
                    whole.backward()
                    assert weight.grad is not None
                    assert weight.grad.item() == (count * total + 1) * len(results[0]), call
                    if differentiated:
                        assert leaf.grad is not None
                        derivative = count if call == "reduce_scatter_coalesced" else count * size
                        assert leaf.grad.tolist() == [float(derivative)] * len(leaf), call


def lossless() -> list[str]:
    """Return the algorithms that the calls of coalesced calls name."""
    asked = []
    with shotcast.Communicator(device="cpu", timeout_s=100, allow_fp8=True) as comm:
        made = comm.all_reduce

        def noted(*args: Any, algorithm: str, **kwargs: Any) -> torch.Tensor:
            asked.append(algorithm)
            return made(*args, algorithm=algorithm, **kwargs)

        comm.all_reduce = noted  # type: ignore[method-assign]
        for algorithm in ("auto", "ring"):
            comm.all_reduce_coalesced([torch.ones(300), torch.ones(7)], algorithm=algorithm)
    return asked


def batch_after_the_library_failed() -> None:
    """Make a batch of messages after calls of the vendor library have failed."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        vendor: Any = comm._vendor
        vendor.failed, vendor._error = True, shotcast.ShotcastError("the library has failed")
        vendor._decided.set()
        try:
            with pytest.raises(shotcast.ShotcastError, match="the library has failed"):
                comm.batch_send_recv([(torch.ones(3), 1 - comm.rank)], [(torch.ones(3), 1 - comm.rank)])
        finally:
            vendor.failed = False
