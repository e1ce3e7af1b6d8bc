"""Products fused with a collective, beside product and collective one by one, and PyTorch's: us of a call.

    python research/fused_products.py --world-size 2 --json benchmarks/data/h200/fused_products_x2.json

With ``--alone``, one rank of so many runs on one GPU, in whose memory the tiles of the others lie already: what
sending, adding up and clearing cost without a link and without waiting, beside the product alone. Products whose rows
arrive are not among these.

One row for each operation, projection of a 70B model divided among the ranks, number of rows and way. Ways take turns;
the time of a call is the median of a rank, and the largest of all ranks. Every result is compared with the product in
float32 before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_times import seconds_each
from gpu_timing import write
from rich.console import Console
from rich.table import Table

import shotcast
from shotcast import wire
from shotcast.bench import kernels
from shotcast.collectives.registry import registered
from shotcast.kernels.triton import gemm
from shotcast.overlap import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from shotcast.overlap.products import ShapedProduct
from shotcast.transport.triton import layout, matmul_reduce
from shotcast.transport.triton.workspace import Workspace
from shotcast.wire import ProductOp

HIDDEN, QUERY_WIDTH, FFN = 8192, 8192, 28672
PROJECTIONS = {"attention output": QUERY_WIDTH, "down": FFN}
"""Inputs of the projections of a 70B model whose sums are over ranks; outputs are HIDDEN."""
GATHERED_PROJECTIONS = {"query, key, value": 10240, "gate, up": 2 * FFN}
"""Outputs of the projections of a 70B model whose inputs, HIDDEN of each row, are gathered."""
ROUNDS, CALLS = 9, 4

Way = Callable[[], Any]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rows", type=lambda text: [int(one) for one in text.split(",")], default=[2048, 4096, 8192])
    parser.add_argument("--alone", action="store_true", help="run one rank, without the others")
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


def summed_ways(comm: shotcast.Communicator, a: torch.Tensor, weight: torch.Tensor) -> dict[str, dict[str, Way]]:
    """Return the ways to sum ``a @ weight.t()`` over the ranks, by operation."""
    b = weight.t()

    def library(collective: Callable[[torch.Tensor], torch.Tensor]) -> Way:
        return lambda: collective(torch.matmul(a, b))

    def by_nccl() -> torch.Tensor:
        product = torch.matmul(a, b)
        dist.all_reduce(product, group=_groups["nccl"])
        return product

    def scattered_by_nccl() -> torch.Tensor:
        product = torch.matmul(a, b)
        out = product.new_empty(product.shape[0] // comm.world_size, product.shape[1])
        dist.reduce_scatter_tensor(out, product, group=_groups["nccl"])
        return out

    def symmetric() -> torch.Tensor:
        name = _groups["nccl"].group_name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", scatter_dim=0, group_name=name)

    return {
        "matmul_reduce_scatter": {
            "fused": lambda: matmul_reduce_scatter(comm, a, b, way="fused"),
            "product, collective": lambda: matmul_reduce_scatter(comm, a, b, way="sequential"),
            "cuBLAS, collective": library(comm.reduce_scatter),
            "cuBLAS, NCCL": scattered_by_nccl,
            "PyTorch's symm_mem": symmetric,
        },
        "matmul_all_reduce": {
            "fused": lambda: matmul_all_reduce(comm, a, b, way="fused"),
            "product, collective": lambda: matmul_all_reduce(comm, a, b, way="sequential"),
            "cuBLAS, collective": library(comm.all_reduce),
            "cuBLAS, NCCL": by_nccl,
        },
    }


def gathered_ways(comm: shotcast.Communicator, shard: torch.Tensor, weight: torch.Tensor) -> dict[str, Way]:
    """Return the ways to multiply the rows of all ranks by ``weight.t()``."""
    b = weight.t()

    def by_nccl() -> torch.Tensor:
        gathered = shard.new_empty(comm.world_size * shard.shape[0], shard.shape[1])
        dist.all_gather_into_tensor(gathered, shard, group=_groups["nccl"])
        return torch.matmul(gathered, b)

    def symmetric() -> torch.Tensor:
        name = _groups["nccl"].group_name
        products: list[torch.Tensor] = torch.ops.symm_mem.fused_all_gather_matmul(shard, [b], 0, name)[1]
        return products[0]

    def ours(way: str) -> Way:
        return lambda: all_gather_matmul(comm, shard, b, way=way).products[0]

    return {
        "fused": ours("fused"),
        "collective, product": ours("sequential"),
        "collective, cuBLAS": lambda: torch.matmul(comm.all_gather(shard), b),
        "NCCL, cuBLAS": by_nccl,
        "PyTorch's symm_mem": symmetric,
    }


_groups: dict[str, Any] = {}


def is_right(got: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> bool:
    """Return whether a result is off by no more than roundings of the products and of the sum in bfloat16."""
    return bool(((got.float() - wanted).abs() <= 2**-6 * size + 1e-3).all())


def measured(comm: shotcast.Communicator, ways: dict[str, Way], wanted: torch.Tensor, size: torch.Tensor) -> Any:
    """Return the median time of each way on the slowest rank in us, or why there is none."""
    found: dict[str, Any] = {}
    for name, way in ways.items():
        try:
            right = is_right(way(), wanted, size)
            torch.cuda.synchronize()
            comm.check()
        except Exception as error:
            found[name], right = f"{type(error).__name__}: {error}"[:200], False
        if not all(comm._host.all_gather(right)):
            found.setdefault(name, "wrong")
    times: dict[str, list[float]] = {name: [] for name in ways if name not in found}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for number in range(ROUNDS):
        names = list(times)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            comm.barrier()
            ways[name]()
            events[0].record()
            for _ in range(CALLS):
                ways[name]()
            events[1].record()
            events[1].synchronize()
            times[name].append(events[0].elapsed_time(events[1]) * 1e3 / CALLS)
    comm.check()
    for name, mine in times.items():
        found[name] = max(comm._host.all_gather(statistics.median(mine)))
    return found


def summed_rows(comm: shotcast.Communicator, count: int) -> list[dict[str, Any]]:
    """Measure the products of ``count`` rows that are summed over the ranks; as one rank."""
    found = []
    for projection, inputs in PROJECTIONS.items():
        part = inputs // comm.world_size
        generator = torch.Generator(comm.device).manual_seed(comm.rank)
        a = torch.randn(count, part, generator=generator, device=comm.device).bfloat16()
        weight = (torch.randn(HIDDEN, part, generator=generator, device=comm.device) / part**0.5).bfloat16()
        product = (a @ weight.t()).float()
        wanted, size = comm.all_reduce(product), comm.all_reduce(product.abs())
        for op, ways in summed_ways(comm, a, weight).items():
            parts = (wanted, size)
            if op == "matmul_reduce_scatter":
                parts = (wanted.chunk(comm.world_size)[comm.rank], size.chunk(comm.world_size)[comm.rank])
            for way, us in measured(comm, ways, *parts).items():
                found.append({"op": op, "projection": projection, "rows": count, "way": way, "us": us})
    return found


def gathered_rows(comm: shotcast.Communicator, count: int) -> list[dict[str, Any]]:
    """Measure the products of ``count`` rows that are gathered; as one rank."""
    found = []
    for projection, outputs in GATHERED_PROJECTIONS.items():
        part = outputs // comm.world_size
        generator = torch.Generator(comm.device).manual_seed(comm.rank)
        shard = torch.randn(count // comm.world_size, HIDDEN, generator=generator, device=comm.device).bfloat16()
        weight = (torch.randn(part, HIDDEN, generator=generator, device=comm.device) / HIDDEN**0.5).bfloat16()
        wanted = (comm.all_gather(shard) @ weight.t()).float()
        for way, us in measured(comm, gathered_ways(comm, shard, weight), wanted, wanted.abs()).items():
            found.append({"op": "all_gather_matmul", "projection": projection, "rows": count, "way": way, "us": us})
    return found


def rows(counts: list[int]) -> list[dict[str, Any]]:
    """Measure all of it; as one rank."""
    comm = shotcast.Communicator(device="cuda", timeout_s=30, max_bytes=256 << 20, exclusive=True)
    _groups["nccl"] = dist.new_group(backend="nccl")
    torch.distributed._symmetric_memory.enable_symm_mem_for_group(_groups["nccl"].group_name)
    found = [row for count in counts for part in (summed_rows, gathered_rows) for row in part(comm, count)]
    comm.close()
    return found


class LocalMemory:
    """Regions of all ranks in the memory of this GPU."""

    multicast_address = 0

    def __init__(self, nbytes: int, world_size: int):
        self.nbytes = nbytes
        self._regions = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
        self.addresses = tuple(region.data_ptr() for region in self._regions)

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._regions[rank][offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        self._regions = []


def alone(op: ProductOp, a: torch.Tensor, b: torch.Tensor, world_size: int) -> tuple[float, float, bool]:
    """Return the us of the kernel of rank 0 and of preparing it, and whether rank 0 got its product plus zeros."""
    room, (m, n) = 256 << 20, (a.shape[0], b.shape[1])
    form = gemm.form_of(a, b, a.new_empty(1, n).expand(m, n))
    call = matmul_reduce.call_of(op, form, gemm.FAST, world_size, room, "bfloat16")
    where = layout.Layout.for_messages(call.plan.room)
    memory, status = LocalMemory(where.nbytes, world_size), torch.zeros(1, dtype=torch.int64, pin_memory=True)
    header = registered().header(call.plan)
    workspace = Workspace(memory, where, 0, world_size, status.data_ptr(), a.device, lambda plan: header)
    workspace.clear(0, 30.0)
    (launch,) = call.launches(workspace.context)
    control = memory.view(0, 0, (layout.CONTROL_WORDS,), torch.int64)
    for rank in range(1, world_size):  # the headers of the others, of call 1
        at = layout.HEADERS + layout.HEADER_WORDS * (wire.MAX_WORLD_SIZE + rank)
        control[at : at + 2] = torch.tensor([word | 1 << 48 for word in header])
    before = control.clone()
    slots = memory.view(0, where.slots_at * layout.QUAD, (where.slots_quads * 4,), torch.int32)
    out = a.new_empty(m // world_size if op is ProductOp.MATMUL_REDUCE_SCATTER else m, n)

    def prepare() -> None:
        control.copy_(before)
        slots.zero_()

    def run(turn: int) -> None:
        prepare()
        launch(torch.cuda.current_stream().cuda_stream, call.given(a, b, out))

    launch.load()
    run(0)
    own = m // world_size
    right = torch.equal(out[:own], ShapedProduct(gemm.FAST)(a, b)[:own]) and int(status) == 0
    preparing_us = seconds_each(lambda turn: prepare(), 1, CALLS) * 1e6
    return seconds_each(run, 1, CALLS) * 1e6 - preparing_us, preparing_us, right


def times_alone(a: torch.Tensor, b: torch.Tensor, world_size: int) -> dict[str, float | str]:
    """Return the us of one rank, and of the product alone, ours and cuBLAS'."""
    out, product = a.new_empty(a.shape[0], b.shape[1]), ShapedProduct(gemm.FAST)
    times: dict[str, float | str] = {
        "product": seconds_each(lambda turn: product(a, b, out), 1, CALLS) * 1e6,
        "cuBLAS": seconds_each(lambda turn: torch.matmul(a, b, out=out), 1, CALLS) * 1e6,
    }
    for op in (ProductOp.MATMUL_REDUCE_SCATTER, ProductOp.MATMUL_ALL_REDUCE):
        us, preparing_us, right = alone(op, a, b, world_size)
        times[op.label] = us if right else "wrong"
        times[f"preparing {op.label}"] = preparing_us
    return times


def rows_alone(counts: list[int], world_size: int) -> list[dict[str, Any]]:
    """Measure one rank of so many."""
    found = []
    for count, (projection, inputs) in itertools.product(counts, PROJECTIONS.items()):
        a = torch.randn(count, inputs // world_size, device="cuda").bfloat16()
        b = torch.randn(HIDDEN, inputs // world_size, device="cuda").bfloat16().t()
        for way, us in times_alone(a, b, world_size).items():
            found.append({"projection": projection, "rows": count, "way": way, "us": us})
    return found


def main() -> None:
    asked = options().parse_args()
    if asked.alone:
        found = rows_alone(asked.rows, asked.world_size)
    else:
        found = shotcast.spawn(rows, asked.world_size, asked.rows, timeout_s=570)[0]
    table = Table("op", "projection", "rows", "way", "us")
    for row in found:
        us = row["us"] if isinstance(row["us"], str) else f"{row['us']:.0f}"
        table.add_row(*(str(row.get(key, "")) for key in ("op", "projection", "rows", "way")), us)
    Console(width=160).print(table)
    if asked.json:
        made_by = kernels.of_modules(
            "kernels.triton.gemm",
            "kernels.triton.arriving_gemm",
            "transport.triton.matmul_reduce",
            "transport.triton.gather_matmul",
            "transport.triton.few_sms",
        )
        write(asked.json, found, made_by, world_size=asked.world_size)


if __name__ == "__main__":
    main()
