"""Calls that go to Gloo."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import communicator_targets as targets
import pytest
import torch
import torch.distributed as dist
from expected_results import reduced

import shotcast
from shotcast.collectives.vendor import gloo, nccl, nccl_library
from shotcast.collectives.vendor.interface import CallError, RefusedError
from shotcast.memory.members import Members
from shotcast.process_group import torch_private
from shotcast.process_group.failure_watch import FailureWatch
from shotcast.wire import CallPlan, Op


@pytest.mark.full
def test_every_reduction_by_name() -> None:
    shotcast.spawn(targets.reductions_by_gloo, 3, timeout_s=300)


def test_reduction_is_part_of_the_key_of_a_call() -> None:
    shotcast.spawn(targets.sums_and_maxima_in_turn, 2, timeout_s=300)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_operation_by_name(world_size: int) -> None:
    shotcast.spawn(targets.vendor_serves_every_operation, world_size, timeout_s=300)


@pytest.mark.parametrize(("value", "calls"), [("1", 1), ("0", 0)])
def test_comparison_of_calls_can_be_switched_off(value: str, calls: int) -> None:
    env = {"SHOTCAST_CHECK_VENDOR": value}
    assert shotcast.spawn(targets.epochs_of_a_call_by_gloo, 2, env=env, timeout_s=300) == [calls] * 2


def test_messages_need_their_two_ranks_alone() -> None:
    env = {"SHOTCAST_ALGORITHM": "vendor"}
    assert shotcast.spawn(targets.messages_by_gloo, 3, 4, env=env, timeout_s=300) == [[0.0, 2.0, 4.0, 6.0], [], []]


def test_messages_that_differ() -> None:
    env = {"SHOTCAST_ALGORITHM": "vendor"}
    sender, receiver, other = shotcast.spawn(targets.different_messages_by_gloo, 3, env=env, timeout_s=300)
    assert isinstance(sender, shotcast.CollectiveMismatch)
    assert receiver.fields == ("dtype",)
    assert other is None


@pytest.mark.parametrize(
    ("text", "cause", "reason"),
    [
        ("[transport/tcp/pair.cc:523] Read error: Connection reset by peer", "connection", "unreachable"),
        ("Socket closed", "connection", "unreachable"),
        ("Application timeout caused pair closure", "deadline", "late"),
        ("Timeout(1000ms)", "deadline", "late"),
        ("recv timed out", "deadline", "late"),
    ],
)
def test_an_error_of_the_library_means_the_same_in_a_group(text: str, cause: str, reason: str) -> None:
    found = gloo._meaning(RuntimeError(text))
    assert isinstance(found, CallError)
    assert found.cause == cause
    explained = FailureWatch(dist.HashStore(), 0, 2).meaning("barrier", RuntimeError(text), 1.0, Members(0))
    assert isinstance(explained, shotcast.CollectiveTimeout)
    assert explained.reason == reason


def test_other_errors_of_the_library_are_refusals() -> None:
    error = RuntimeError("Invalid scalar type")
    assert isinstance(gloo._meaning(error), RefusedError)
    assert FailureWatch(dist.HashStore(), 0, 2).meaning("barrier", error, 1.0, Members(0)) is error


@pytest.mark.parametrize("kernels", [{}, {"SHOTCAST_CPU_KERNELS": "interpreter", "TRITON_INTERPRET": "1"}])
def test_two_ranks_that_both_send_first_are_told(kernels: dict[str, str]) -> None:
    env = {"SHOTCAST_ALGORITHM": "vendor", **kernels}
    results = shotcast.spawn(targets.crossed_messages_by_gloo, 2, env=env, timeout_s=300)
    texts = [str(error) for error, _ in results]
    assert max(took for _, took in results) < 60  # of 300
    # the rank that looks first stops the other, which may not have looked yet
    told = ["the answer to a send(float32, 16 B, vendor" in text for text in texts]
    assert any(told)
    for text, own in zip(texts, told, strict=True):
        assert own or "The rank that found the mismatch reports the calls" in text


def test_nccl_connected_in_inference_mode_counts_calls_in_any_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts in a tensor of the device, which it makes with the connection."""
    zeros = torch.zeros

    def unpinned(*shape: int, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        return zeros(*shape, **how)

    def copied(target: Any, source: Any, nbytes: Any, stream: Any) -> int:
        ctypes.memmove(target, source.value, nbytes.value)
        return 0

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(nccl, "raw_stream", lambda _: 0)
    monkeypatch.setattr(nccl.driver, "library", lambda: SimpleNamespace(cuMemcpyDtoHAsync_v2=copied))
    monkeypatch.setattr(nccl.NcclGroup, "_connect", lambda *_: None)
    monkeypatch.setattr(nccl.NcclGroup, "_enqueue", lambda *_: None)
    plan = CallPlan(Op.BARRIER, "vendor", "uint8", 0)
    with torch.inference_mode():
        group = nccl.NcclGroup(dist.HashStore(), 0, 1, torch.device("cpu"), 5.0, lambda: None)
        group.run(plan, None, None)
    group.run(plan, None, None)
    with torch.no_grad():
        group.run(plan, None, None)
    with torch.inference_mode():
        group.run(plan, None, None)
    assert group.progress() == (4, 4)
    assert group._word.fill_(1).item() == 1


@pytest.mark.every(2)
@pytest.mark.parametrize("env", [{}, {"SHOTCAST_CPU_KERNELS": "interpreter", "TRITON_INTERPRET": "1"}], ids=str)
def test_first_calls_in_inference_mode_serve_all_modes(env: dict[str, str]) -> None:
    shotcast.spawn(targets.first_calls_in_inference_mode, 2, env=env, timeout_s=300)


@pytest.mark.parametrize(
    ("world_size", "env"),
    [
        (2, {}),
        (2, {"SHOTCAST_CPU_KERNELS": "interpreter", "TRITON_INTERPRET": "1"}),
        (3, {"SHOTCAST_ALGORITHM": "vendor"}),
    ],
    ids=str,
)
def test_a_default_device_is_harmless(world_size: int, env: dict[str, str]) -> None:
    shotcast.spawn(targets.calls_with_a_default_device, world_size, env=env, timeout_s=300)


@pytest.mark.parametrize("reduction", ["sum", "max", "bor", "prod", "min", "band"])
def test_nccl_reduces_bool_as_bytes_of_which_any_may_be_true(reduction: str) -> None:
    """The plan that NCCL gets, by torch in its place, and what is done to its result."""
    raw = torch.randint(0, 4, (3, 200), generator=torch.Generator().manual_seed(1)).to(torch.uint8) * 85
    plan = CallPlan(Op.ALL_REDUCE, "vendor", "bool", 200, reduction=reduction)
    asked = nccl._reducible(plan)
    assert asked.dtype == "uint8"
    out = {"max": torch.amax, "min": torch.amin}[asked.reduction](raw, 0).view(torch.bool)
    nccl._make_true_one(plan, out)
    wanted = reduced([part.ne(0) for part in raw], reduction)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    with pytest.raises(nccl.RefusedError, match="no bxor"):
        nccl._reducible(CallPlan(Op.ALL_REDUCE, "vendor", "bool", 200, reduction="bxor"))


@pytest.mark.parametrize(("given", "found"), [(None, "0"), ("1", "1")])
def test_nccl_registers_no_memory_of_graphs_unless_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
) -> None:
    """The tests of GPUs show why: ``test_graphs_read_memory_at_an_address_that_another_had``."""
    made = functools.partial(torch_private.inner_nccl, None, 0, 1, timedelta(1), None)
    for use in (nccl_library.library.__wrapped__, made):
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", given or "")
        if given is None:
            monkeypatch.delenv("NCCL_GRAPH_REGISTER")
        with contextlib.suppress(OSError, AttributeError, TypeError):  # there is no NCCL here
            use()
        assert os.environ["NCCL_GRAPH_REGISTER"] == found
