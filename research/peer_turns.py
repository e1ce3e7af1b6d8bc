"""Our all-reduce beside those of peers in the same processes, in turns, plain and with residual and RMSNorm::

    torchrun --nproc-per-node 2 research/peer_turns.py --json FILE

Peers are NCCL, on plain memory and on memory that is registered with it (``LD_PRELOAD`` brings another version), and
where they are installed, SGLang's custom all-reduce v2 and TensorRT-LLM's kernels by FlashInfer. Results are compared
with a float64 sum before anything is timed. Then ten calls make a graph, or two from 16 MiB on, and the graphs take
turns in three rounds. ``us`` is the time of a call where each replay is waited for, ``together_us`` where 20 replays
are enqueued at once: the median of a rank, the most of the ranks, then the median of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_timing import write
from rich.console import Console
from rich.table import Table

import shotcast
from shotcast.bench import kernels
from shotcast.kernels.triton.norm import launch_norm_sum
from shotcast.memory.operands import NormTensors
from shotcast.units import format_size, parse_size
from shotcast.wire import Norm

HIDDEN, EPS = 8192, 1e-5
SIZES = ",".join(format_size(1 << power).replace(" ", "") for power in range(10, 29))
TOKENS = "1,2,4,8,16,32,64,128,256,512"
LARGE = 16 << 20
"""Bytes from which on a graph has two calls, and fewer replays are made."""
PUSHED = 16 << 20
"""The most bytes that SGLang's kernels take."""
OURS = "shotcast"


class Contender(NamedTuple):
    """A way of making a call.

    Attributes:
        name: whose it is.
        run: makes the call, and returns its result.
        restore: makes the input small again where the call works in place.
        capture: as ``torch.cuda.graph``.
    """

    name: str
    run: Callable[[], torch.Tensor]
    restore: Callable[[], Any] = lambda: None
    capture: Callable[[torch.cuda.CUDAGraph], contextlib.AbstractContextManager[Any]] = torch.cuda.graph


class Job(NamedTuple):
    """The ranks that measure."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup  # Gloo's, of all ranks

    def values(self, seed: int, rank: int, *shape: int) -> torch.Tensor:
        """Return the values of a rank, the same wherever they are drawn."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + rank)
        return torch.randn(*shape, generator=generator, device=self.device).bfloat16()


class Ours:
    """Our calls, by an exclusive communicator, and our sum with a separate norm."""

    def __init__(self, job: Job, most: int):
        self.comm = shotcast.Communicator(device="cuda", exclusive=True, timeout_s=30)

    def sums(self, x: torch.Tensor) -> Iterator[Contender]:
        out = torch.empty_like(x)
        yield Contender(OURS, lambda: self.comm.all_reduce(x, out=out))

    def norms(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Iterator[Contender]:
        into = torch.empty_like(x), torch.empty_like(x)
        yield Contender(OURS, lambda: self.comm.all_reduce_rms_norm(x, residual, weight, EPS, out=into)[0])
        total, new_residual, normed = (torch.empty_like(x) for _ in range(3))
        tensors = NormTensors(residual, weight, EPS, new_residual, normed)

        def unfused() -> torch.Tensor:
            launch_norm_sum(self.comm.all_reduce(x, out=total), tensors, Norm(HIDDEN))
            return normed

        yield Contender("unfused", unfused)


class Nccl:
    """NCCL's all-reduce in place."""

    def __init__(self, job: Job, most: int):
        self._plain = torch.zeros(most // 2, dtype=torch.bfloat16, device=job.device)
        backend = dist.group.WORLD._get_backend(job.device)  # type: ignore[union-attr]
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            self._symmetric = torch.zeros_like(self._plain)
        backend.register_mem_pool(pool, symm=True)

    def sums(self, x: torch.Tensor) -> Iterator[Contender]:
        for name, memory in (("nccl", self._plain), ("nccl_symmetric", self._symmetric)):
            part = memory[: x.numel()]
            part.copy_(x)

            def run(part: torch.Tensor = part) -> torch.Tensor:
                dist.all_reduce(part)
                return part

            yield Contender(name, run, part.zero_)

    def norms(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Iterator[Contender]:
        yield from ()


class Sglang:
    """SGLang's custom all-reduce v2: its own choice and two-shot, on memory that stays where it is."""

    def __init__(self, job: Job, most: int):
        os.environ.setdefault("SGLANG_SKIP_P2P_CHECK", "1")
        from sglang.kernels.ops.communication import all_reduce, all_reduce_fusion
        from sglang.srt.distributed.device_communicators import custom_all_reduce_v2

        self._size, self._fusion = job.size, all_reduce_fusion
        self._comm = custom_all_reduce_v2.CustomAllReduceV2(job.group, job.device)
        if self._comm.disabled:  # it asks NVML about NVLink, which may not answer
            custom_all_reduce_v2.can_use_custom_all_reduce_v2 = lambda group, device: True
            self._comm = custom_all_reduce_v2.CustomAllReduceV2(job.group, job.device)
        self._forms = {"sglang": None}
        self._forms |= {one.algo_name: one for one in all_reduce.AllReduceAlgo if one.algo_name == "2shot_push"}
        self._memory = torch.zeros(PUSHED // 2, dtype=torch.bfloat16, device=job.device)
        all_reduce_fusion.register_comm(self._comm.obj)

    @contextlib.contextmanager
    def _capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        with self._comm.capture(), torch.cuda.graph(graph):
            yield

    def sums(self, x: torch.Tensor) -> Iterator[Contender]:
        if x.numel() > self._memory.numel():
            return
        part = self._memory[: x.numel()]
        for name, form in self._forms.items():
            part.copy_(x)

            def run(form: Any = form) -> torch.Tensor:
                self._comm.override_algo = form
                return self._comm.custom_all_reduce(part)

            yield Contender(name, run, part.zero_, self._capture)

    def norms(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Iterator[Contender]:
        if x.shape[0] > 128:  # it has no kernel
            return
        self._comm.override_algo = None
        part = self._memory[: x.numel()].view_as(x).copy_(x)
        before, after = residual.clone(), torch.empty_like(x)
        run = self._fusion.all_reduce_residual_norm
        options = {"world_size": self._size, "residual_out": after, "two_shot": None}
        yield Contender("sglang", lambda: run(part, before, weight, EPS, **options)[0], capture=self._capture)


class FlashInfer:
    """TensorRT-LLM's kernels by FlashInfer, in one shot and in two, with an early launch."""

    def __init__(self, job: Job, most: int):
        from flashinfer import comm as library

        self._job, self._library = job, library
        create = library.trtllm_create_ipc_workspace_for_all_reduce_fusion
        self._handles, self._workspace = create(job.rank, job.size, 512, HIDDEN, group=job.group)[:2]

    def _calls(self, x: torch.Tensor, pattern: Any, result: torch.Tensor, **options: Any) -> Iterator[Contender]:
        names = "allreduce_out residual_in residual_out norm_out rms_gamma rms_eps quant_out scale_out scale_factor"
        given = dict.fromkeys([*names.split(), "layout_code"]) | options
        for name, one_shot in (("flashinfer 1shot", True), ("flashinfer 2shot", False)):
            if x.shape[0] <= self._job.size and not one_shot:
                continue

            def run(one_shot: bool = one_shot) -> torch.Tensor:
                self._library.trtllm_allreduce_fusion(
                    allreduce_in=x,
                    world_size=self._job.size,
                    world_rank=self._job.rank,
                    token_num=x.shape[0],
                    hidden_dim=HIDDEN,
                    workspace_ptrs=self._workspace,
                    launch_with_pdl=True,
                    use_oneshot=one_shot,
                    trigger_completion_at_end=False,
                    fp32_acc=True,
                    pattern_code=pattern,
                    **given,
                )
                return result

            yield Contender(name, run)

    def sums(self, x: torch.Tensor) -> Iterator[Contender]:
        if x.numel() % HIDDEN or x.numel() > 512 * HIDDEN:
            return
        rows, out = x.view(-1, HIDDEN), torch.empty_like(x)
        pattern = self._library.AllReduceFusionPattern.kAllReduce
        yield from self._calls(rows, pattern, out, allreduce_out=out.view_as(rows))

    def norms(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Iterator[Contender]:
        normed, after = torch.empty_like(x), torch.empty_like(x)
        norm = {"residual_in": residual, "residual_out": after, "norm_out": normed, "rms_gamma": weight, "rms_eps": EPS}
        yield from self._calls(x, self._library.AllReduceFusionPattern.kARResidualRMSNorm, normed, **norm)


def captured(job: Job, one: Contender, calls: int) -> torch.cuda.CUDAGraph:
    """Return a graph of some calls, which all ranks have replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        one.run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier(job.group)
    graph = torch.cuda.CUDAGraph()
    with one.capture(graph):
        for _ in range(calls):
            one.run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def seconds_of(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Return the seconds that some replays take on the GPU, from the first to the last."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def timed(job: Job, graph: torch.cuda.CUDAGraph, calls: int, many: int) -> tuple[float, float]:
    """Return us of a call, replay by replay and of ``many`` replays together: medians, the most of all ranks."""
    own = []
    for replays, rounds in ((1, 2 * many), (many, 3)):
        graph.replay()
        torch.cuda.synchronize()
        dist.barrier(job.group)
        own.append(median(seconds_of(graph, replays) / replays for _ in range(rounds)) / calls * 1e6)
    most = torch.tensor(own)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=job.group)
    return most[0].item(), most[1].item()


def in_turns(
    job: Job, contenders: Iterable[Contender], wanted: torch.Tensor, bound: torch.Tensor, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Compare the results of contenders, then time them in turns. Returns a row of each; as one rank.

    Args:
        wanted: the result in float64.
        bound: how far a result may be from it.
        facts: of the message, for each row.
    """
    calls, many = (2, 5) if facts["bytes"] >= LARGE else (10, 20)
    kept = []
    for one in contenders:
        off = (one.run().double() - wanted).abs()
        if not bool((off <= bound).all()):
            raise ValueError(f"{one.name} is off by {off.max().item()}: {facts}")
        one.restore()
        kept.append((one, captured(job, one, calls)))  # a graph needs the tensors of its call
    times: dict[str, list[tuple[float, float]]] = {one.name: [] for one, _ in kept}
    for turn in range(3):
        for one, graph in kept[:: -1 if turn % 2 else 1]:
            times[one.name].append(timed(job, graph, calls, many))
    rows = []
    for name, found in times.items():
        us, together = (round(median(values), 3) for values in zip(*found, strict=True))
        rows.append(facts | {"by": name, "us": us, "together_us": together})
    return rows


def measure(sizes: list[int], tokens: list[int]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of all contenders, message by message; as one rank."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    job = Job(dist.get_rank(), dist.get_world_size(), device, dist.new_group(backend="gloo"))
    installed = [(Ours, ""), (Nccl, ""), (Sglang, "sglang"), (FlashInfer, "flashinfer")]
    peers = [kind(job, max(sizes, default=0)) for kind, name in installed if not name or importlib.util.find_spec(name)]
    for nbytes in sizes:
        parts = [job.values(1, rank, nbytes // 2).double() for rank in range(job.size)]
        total, bound = sum(parts), sum(part.abs() for part in parts) * 2.0**-8
        contenders = (one for peer in peers for one in peer.sums(parts[job.rank].bfloat16()))
        yield in_turns(job, contenders, total, bound, {"op": "all_reduce", "tokens": 0, "bytes": nbytes})
    for count in tokens:
        parts = [job.values(2, rank, count, HIDDEN).double() for rank in range(job.size)]
        residual, weight = job.values(2, 99, count, HIDDEN), 1 + 0.1 * job.values(3, 99, HIDDEN)
        added = sum(parts) + residual.double()
        normed = added * (added.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        contenders = (one for peer in peers for one in peer.norms(parts[job.rank].bfloat16(), residual, weight))
        facts = {"op": "all_reduce_rms_norm", "tokens": count, "bytes": 2 * count * HIDDEN}
        yield in_turns(job, contenders, normed, normed.abs() * 2.0**-7 + 2.0**-6, facts)
    peers[0].comm.check()


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return the times by message, and the ratios of ours to the best of the others."""
    names = list(dict.fromkeys(row["by"] for row in rows))
    table = Table("message", *names, "ratio")
    messages: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        messages.setdefault((row["tokens"], row["bytes"]), {})[row["by"]] = row
    for (tokens, nbytes), by in messages.items():
        shown = [f"{by[name]['us']:.2f} {by[name]['together_us']:.2f}" if name in by else "" for name in names]
        ratios = []
        for kind in ("us", "together_us"):
            others = [row[kind] for name, row in by.items() if name != OURS]
            ratios.append(f"{by[OURS][kind] / min(others):.3f}" if others else "-")
        table.add_row(f"{tokens} tokens" if tokens else format_size(nbytes), *shown, " ".join(ratios))
    return table


def nccl_version() -> str:
    """Return the version of the library that runs."""
    from torch._C._distributed_c10d import ProcessGroupNCCL  # CPU builds have none

    return ".".join(map(str, ProcessGroupNCCL.get_runtime_nccl_version()))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="bytes of plain messages")
    parser.add_argument("--tokens", default=TOKENS, help=f"rows of {HIDDEN} of fused calls")
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


def main() -> None:
    asked = options().parse_args()
    sizes = [parse_size(one) for one in asked.sizes.split(",") if one]
    rows: list[dict[str, Any]] = []
    facts: dict[str, str] = {}
    for found in measure(sizes, [int(one) for one in asked.tokens.split(",") if one]):
        rows += found
        if dist.get_rank() != 0:
            continue
        print(*found, sep="\n", flush=True)
        if asked.json:  # what is measured is kept if the rest is cut off
            facts = facts or kernels.of_collectives("cuda")
            write(asked.json, rows, facts, nccl_version=nccl_version())
    if dist.get_rank() == 0:
        Console(width=200).print(table_of(rows))
    dist.barrier()
    os._exit(0)  # peers leave memory that others have mapped


if __name__ == "__main__":
    main()
