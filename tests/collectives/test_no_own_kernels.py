"""The vendor library serves where our kernels cannot run, and explain gives the reason."""

from __future__ import annotations

import pytest
import torch

import shotcast
from shotcast.collectives.algorithm import CollectiveProblem, Topology
from shotcast.collectives.choice.select import choose
from shotcast.collectives.registry import registered
from shotcast.hardware.nodes import NodeLayout
from shotcast.transport.transport import NO_TRANSPORT
from shotcast.transport.triton.build import peer_unsupported_reason
from shotcast.wire import Op


def test_gpus_without_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: {device, peer} != {0, 2})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    gpus = {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2}
    factory = "shotcast.transport.triton.build"
    monkeypatch.setattr(f"{factory}.visible_gpus", lambda: gpus)
    monkeypatch.setattr(f"{factory}.uuid_of", lambda device: list(gpus)[device.index])
    assert peer_unsupported_reason(torch.device("cuda", 1), dict(enumerate(gpus))) == ""
    unsupported_reason = peer_unsupported_reason(torch.device("cuda", 0), dict(enumerate(gpus)))
    assert unsupported_reason == "GPU 0 has no peer access to GPU 2"
    layout = NodeLayout.one_node(3)
    topology = Topology(
        layout, "cuda", "NVIDIA X", NO_TRANSPORT, f"rank 0: {unsupported_reason}", False, 1 << 20, registered()
    )
    choice = choose(CollectiveProblem(Op.ALL_REDUCE, 1024, "float32", topology), "auto", "auto", ())
    assert choice.candidate.algorithm == "vendor"
    assert "GPU 0 has no peer access to GPU 2" in choice.reason
    with pytest.raises(shotcast.ConfigError, match="GPU 0 has no peer access to GPU 2"):
        choose(CollectiveProblem(Op.ALL_REDUCE, 1024, "float32", topology), "two_shot", "auto", ())


def nine() -> tuple[list[float], str]:
    with shotcast.Communicator(device="cpu") as comm, shotcast.Communicator(device="cpu"):
        x = torch.full([3], float(comm.rank))
        comm.barrier()
        total = comm.all_reduce(x)
        comm.reset()
        assert torch.equal(comm.all_gather(x), torch.arange(9.0).repeat_interleave(3))
        return total.tolist(), comm.explain(x).reason


def test_more_ranks_than_own_kernels_serve(capfd: pytest.CaptureFixture[str]) -> None:
    for total, reason in shotcast.spawn(nine, 9, timeout_s=300):
        assert total == [36.0] * 3
        assert "up to 8 ranks, not 9" in reason
    said = [line for line in capfd.readouterr().err.splitlines() if "native kernels serve" in line]
    assert said == [  # by one rank, of the first of two communicators
        "the vendor library serves all calls of communicator 0/0: native kernels serve up to 8 ranks, not 9"
    ]
