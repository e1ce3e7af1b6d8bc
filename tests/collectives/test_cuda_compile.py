"""Compiled models on GPUs, replayed from CUDA graphs, with the bits of eager code. Run with ``pytest -m gpu``."""

from __future__ import annotations

from typing import Any

import compile_targets as targets
import pytest
import torch
from compile_targets import Block, assert_same
from torch import nn
from torch._dynamo.utils import counters

import shotcast
from shotcast.collectives.rank_device import enough_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 4, 8) if enough_gpus(n)]


class Normed(nn.Module):
    """A transformer block without attention: a fused all-reduce and norm, then the linear layers."""

    def __init__(self, comm: shotcast.Communicator, hidden: int):
        super().__init__()
        self.comm = comm
        self.block = Block(comm, hidden, torch.bfloat16)
        self.weight = nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16, device=comm.device))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.comm.all_reduce_rms_norm(x, residual, self.weight)
        return (normed @ self.block.up.t()).relu() @ self.block.down, residual


def outputs(model: nn.Module, comm: shotcast.Communicator, x: torch.Tensor) -> list[torch.Tensor]:
    """Run two layers and a last sum. The results are cloned, as the next replay of a graph overwrites them."""
    residual = torch.zeros_like(x)
    for layer in model:
        x, residual = layer(x, residual)
    return [comm.all_reduce(x).clone(), residual.clone()]


def inputs(comm: shotcast.Communicator, rows: int, hidden: int, seed: int) -> torch.Tensor:
    return targets.values(comm, rows, hidden, seed=seed, dtype=torch.bfloat16)


def reduce_overhead(rows: list[int]) -> int:
    """Run mode="reduce-overhead" on changing inputs, between eager calls. Return how many calls the host made."""
    hidden = 512
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm, torch.no_grad():
        model = nn.ModuleList(Normed(comm, hidden) for _ in range(2))
        labels: list[str] = []
        run = comm._run
        comm._prepared.pause()  # calls that are prepared do not pass there

        def logged(op: Any, *args: Any, **kwargs: Any) -> Any:
            labels.append(op.label)
            return run(op, *args, **kwargs)

        def layers(x: torch.Tensor) -> list[torch.Tensor]:
            residual = torch.zeros_like(x)
            for layer in model:
                x, residual = layer(x, residual)
            return [comm.all_reduce(x), residual]

        traced = torch.compile(layers, mode="reduce-overhead", fullgraph=True, dynamic=False)
        by_host = 0
        for seed in range(12):  # first eager, then recorded, then replayed
            for count in rows:
                x = inputs(comm, count, hidden, seed)
                torch.compiler.cudagraph_mark_step_begin()
                comm._run = logged
                got = [tensor.clone() for tensor in traced(x)]
                comm._run = run
                by_host += len(labels)
                assert seed < 4 or not labels, "a replay needs no host"
                labels.clear()
                assert_same(got, outputs(model, comm, x))
        torch.cuda.synchronize()
        comm.check()
        assert counters["inductor"]["cudagraph_skips"] == 0
        return by_host


def manual_graph(rows: int) -> None:
    """Capture a compiled module with torch.cuda.graph after a warm-up, and replay it on changed inputs."""
    hidden = 512
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm, torch.no_grad():
        model = nn.ModuleList(Normed(comm, hidden) for _ in range(2))
        traced = torch.compile(lambda x: outputs(model, comm, x), fullgraph=True, dynamic=False)
        x = inputs(comm, rows, hidden, 0)
        side = torch.cuda.Stream(comm.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                traced(x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = traced(x)
        for seed in range(1, 20):
            x.copy_(inputs(comm, rows, hidden, seed))
            graph.replay()
            assert_same(kept, outputs(model, comm, x))
        torch.cuda.synchronize()
        comm.check()


def first_use_in_a_capture() -> None:
    """Capture a compiled call of a size that needs another form of the kernel: it is refused, and works afterwards."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        traced = torch.compile(lambda x: comm.all_reduce(x, algorithm="two_shot"), fullgraph=True, dynamic=True)
        traced(torch.ones(64, device=comm.device))
        x = torch.ones(4 << 20, device=comm.device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(shotcast.ConfigError, match="inside a graph capture; call it once before"),
            torch.cuda.graph(graph),
        ):
            traced(x)
        torch.cuda.synchronize()
        assert traced(x)[-1] == comm.world_size
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = traced(x)
        x.fill_(3)
        graph.replay()
        assert out[-1] == 3 * comm.world_size
        comm.check()


def training(backend: str) -> None:
    """Compare forward, backward and gradients of compiled blocks with those of eager ones."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        model = nn.Sequential(*(Block(comm, 256) for _ in range(2)))
        traced = torch.compile(model, fullgraph=True, backend=backend)
        for seed in range(3):
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)).to(comm.device)
            grads: list[list[Any]] = []
            for run in (model, traced):
                model.zero_grad()
                run(x).square().sum().backward()
                grads.append([parameter.grad.clone() for parameter in model.parameters()])
            for got, wanted in zip(grads[1], grads[0], strict=True):
                torch.testing.assert_close(got, wanted)
        torch.cuda.synchronize()
        comm.check()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("rows", [[1], [8, 512]], ids=str)
def test_reduce_overhead_replays_on_changed_inputs(world_size: int, rows: list[int]) -> None:
    by_host = shotcast.spawn(reduce_overhead, world_size, rows, timeout_s=380)
    # The first run is eager and makes three calls; recording makes three more. All ranks make equally many.
    assert by_host == [by_host[0]] * world_size
    assert by_host[0] >= 6 * len(rows)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("rows", [1, 256])
def test_a_captured_compiled_model_replays_on_changed_inputs(world_size: int, rows: int) -> None:
    shotcast.spawn(manual_graph, world_size, rows, timeout_s=380)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_first_use_in_a_capture(world_size: int) -> None:
    shotcast.spawn(first_use_in_a_capture, world_size, timeout_s=200)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training(world_size: int, backend: str) -> None:
    shotcast.spawn(training, world_size, backend, timeout_s=380)
