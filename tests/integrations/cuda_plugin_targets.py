"""Functions that the ranks of tests/integrations/test_cuda_plugins.py run."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from shotcast.collectives import reference
from shotcast.collectives.rank_device import gpu_of, gpus_are_shared
from shotcast.integrations.sglang_hooks import CustomAllReduce
from shotcast.integrations.tensor_parallel import make_sums


def captured_sums(batch_invariant: bool) -> dict[str, int]:
    """Warm up, capture and replay sums and a fused norm as the host programs do. Return the calls."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", gpu_of(rank))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo" if gpus_are_shared() else "cpu:gloo,cuda:nccl")
    group = dist.new_group(backend="gloo")
    sums = make_sums(group, device, "tp:0", batch_invariant, "the test")
    assert sums is not None
    ours, size = CustomAllReduce(sums, None), dist.get_world_size()
    generator = [torch.Generator().manual_seed(peer) for peer in range(size)]
    shapes = [(1, 4096), (17, 4096), (2048, 4096)]
    weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream()
    with torch.inference_mode(), ours.capture(), torch.cuda.stream(stream):
        for rows, hidden in shapes:
            x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
            residual = torch.ones_like(x)
            for _ in range(2):  # the warm-up
                assert ours.should_custom_ar(x)
                ours.custom_all_reduce(x)
                ours.fused_allreduce_rmsnorm(x, residual, weight, 1e-5)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = ours.custom_all_reduce(x)
                fused = ours.fused_allreduce_rmsnorm(x, residual, weight, 1e-5)
            for _ in range(3):
                xs = [torch.randn(rows, hidden, generator=one).bfloat16() for one in generator]
                x.copy_(xs[rank])
                graph.replay()
                torch.cuda.synchronize()
                total = reference.ordered_sum(xs)
                assert out is not None
                assert torch.equal(out.cpu(), total)
                assert (fused is None) == batch_invariant
                if fused is not None:
                    assert torch.equal(fused[1].cpu(), reference.add_residual(total, torch.ones_like(total)))
    calls = dict(sums.calls)
    sums.close()
    dist.destroy_process_group()
    return calls
