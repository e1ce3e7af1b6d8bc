"""Ranks of several logical nodes, as forked processes, for tests of the network below the Communicator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from local_ranks import LocalGroup
from shotcast.hardware.nodes import NodeLayout
from shotcast.transport.cpu import send_recv
from shotcast.transport.network import copies, messages, sums
from shotcast.transport.network.executor import HostsExecutor
from shotcast.transport.transport import Ranks
from shotcast.wire import CallPlan, HeaderWords, LaunchShape, Op, encode_header

SUMS = {
    "nvrar": sums.DOUBLING,
    "nvrar_pairs": sums.ALL_PAIRS,
    "nvrar_two_shot": sums.TWO_SHOT,
    "nvrar_halving": sums.HALVING,
}
FUSED = {
    "nvrar": sums.NORMED_DOUBLING,
    "nvrar_pairs": sums.NORMED_ALL_PAIRS,
    "nvrar_two_shot": sums.NORMED_TWO_SHOT,
    "nvrar_halving": sums.NORMED_HALVING,
}
CALLS = {**SUMS, "nvrar_16bit": sums.IN_16_BITS, "vendor": copies.BARRIER}
NAMES = (*CALLS, "message")


class _Part:
    """Some ranks of a group; all ranks of the group exchange whenever those of one part do."""

    def __init__(self, whole: Hosts, ranks: Iterable[int]):
        self._whole, self._ranks = whole, list(ranks)
        self.rank, self.world_size = self._ranks.index(whole.rank), len(self._ranks)

    def all_gather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        values = self._whole.all_gather(value, timeout_s)
        return [values[rank] for rank in self._ranks]

    def barrier(self, timeout_s: float | None = None) -> None:
        self.all_gather(None, timeout_s)


class Hosts:
    """All ranks, on pipes."""

    name, meeting_point, left = "test", "127.0.0.1", ()

    def __init__(self, group: LocalGroup):
        self._group, self.rank, self.world_size = group, group.rank, group.world_size

    def all_gather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        return self._group.all_gather(value, timeout_s)

    def barrier(self, timeout_s: float | None = None) -> None:
        self._group.barrier(timeout_s)

    def part(self, ranks: Iterable[int], name: str) -> _Part:
        return _Part(self, ranks)


class _Algorithms:
    def header(self, plan: CallPlan) -> HeaderWords:
        return encode_header(plan, NAMES.index(plan.algorithm))

    def kernel(self, plan: CallPlan, kind: str) -> Any:
        if plan.norm is not None:
            return FUSED[plan.algorithm]
        if plan.op in (Op.ALL_GATHER, Op.BROADCAST):
            return getattr(copies, plan.op.name)
        if plan.algorithm == "message":
            return getattr({"hosts": messages, "cpu": send_recv}[kind], plan.op.name)
        assert kind == "hosts"
        return CALLS[plan.algorithm]


def layout_of(nodes: int, local: int) -> NodeLayout:
    return NodeLayout.of_keys([f"n{rank // local}" for rank in range(nodes * local)])


def executor_of(group: LocalGroup, nodes: int, local: int, timeout_s: float = 60.0) -> HostsExecutor:
    hosts: Any = Hosts(group)
    place = layout_of(nodes, local), False, torch.device("cpu")
    return HostsExecutor(Ranks(hosts, *place, 1 << 20, timeout_s, _Algorithms()))


def all_reduce(executor: HostsExecutor, algorithm: str, x: torch.Tensor, out: torch.Tensor) -> None:
    launch = LaunchShape(programs=0, block_words=0, num_warps=0)
    plan = CallPlan(Op.ALL_REDUCE, algorithm, str(x.dtype)[6:], x.numel() * x.element_size(), launch=launch)
    executor.bind(plan).run(x, out)


def barrier(executor: HostsExecutor) -> None:
    executor.bind(CallPlan(Op.BARRIER, "vendor", "uint8", 0)).run(None, None)
