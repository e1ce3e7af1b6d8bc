"""Compile a step that calls PyTorch's functional collectives, and compare it with the same step uncompiled.

    torchrun --nproc-per-node 2 examples/frameworks/functional_collectives.py --backend shotcast

The graph makes the calls of the function, in the same order.
"""

import statistics
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from common import arguments, digest, join, say

ROWS, COLUMNS = 8, 32


def step(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    total = funcol.all_reduce(torch.sin(x), "sum", group)
    rows = funcol.all_gather_tensor(total[:ROWS] * 0.5, 0, group)  # [ranks * ROWS, COLUMNS]
    part = funcol.reduce_scatter_tensor(rows, "sum", 0, group) / ranks
    turned = funcol.all_to_all_single(part.repeat(ranks, 1), None, None, group)
    first = funcol.broadcast(turned.cos(), 0, group)
    pair = funcol.all_reduce_coalesced([part, first], "sum", group)
    return pair[0].sum() + pair[1][:ROWS].square() + turned[:ROWS]


def main() -> None:
    options = arguments(__doc__, steps=20).parse_args()
    device = join(options)
    group = dist.group.WORLD
    compiled = torch.compile(step, fullgraph=True)
    results, same, times_ms = [], True, []
    for number in range(options.steps):
        x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(number)).to(device) + dist.get_rank()
        start = time.perf_counter()
        found = compiled(x, group)
        times_ms.append(1e3 * (time.perf_counter() - start))
        same &= torch.allclose(found, step(x, group), rtol=1e-5, atol=1e-5)
        results.append(found)
    say(results=digest(results), same=same, step_ms=statistics.median(times_ms))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
