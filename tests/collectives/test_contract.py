"""The choice of algorithm keeps the numerics contract: sums left to ``auto`` have the bits of one-shot."""

from __future__ import annotations

import pytest

from shotcast.collectives.algorithm import CollectiveProblem, Topology
from shotcast.collectives.choice.select import choose
from shotcast.collectives.choice.table import packaged
from shotcast.collectives.registry import registered
from shotcast.cost.collective import NetworkCost
from shotcast.hardware.nodes import NodeLayout
from shotcast.transport.transport import Network
from shotcast.wire import NodeShape, Op
from transports_by_name import named

SIZES = (0, 4, 4096, 100_000, 1 << 20, 16 << 20, 64 << 20, 400 << 20)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", range(3, 9))
@pytest.mark.parametrize("multicast", [False, True])
def test_auto_keeps_the_bits_of_a_sum(device: str, world_size: int, multicast: bool) -> None:
    kernels, part = ("compiled", "cpu") if device == "cpu" else ("triton", "NVIDIA H200")
    topology = Topology(
        NodeLayout.one_node(world_size), device, part, named(kernels), "", multicast, 512 << 20, registered()
    )
    table = packaged(part, NodeShape(1, world_size), registered())
    for tables in ((), (("packaged table", table),) if table else ()):
        for op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            for dtype in ("float32", "float16", "bfloat16"):
                for nbytes in SIZES:
                    choice = choose(CollectiveProblem(op, nbytes, dtype, topology), "auto", "auto", tables)
                    assert choice.candidate.algorithm in ("one_shot", "two_shot", "vendor"), (op, dtype, nbytes, choice)


@pytest.mark.parametrize("kernels", ["compiled", "interpreter", "triton"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 1), (4, 2), (8, 1)], ids=str)
def test_auto_keeps_the_bits_of_a_sum_over_nodes(kernels: str, shape: tuple[int, int]) -> None:
    nodes, ranks = shape
    layout = NodeLayout.of_keys([str(node) for node in range(nodes) for _ in range(ranks)])
    device, network = ("cuda" if kernels == "triton" else "cpu"), Network("some wires", NetworkCost(5.0, 10.0))
    facts = layout, device, "X", named(kernels, nodes), "", True, 512 << 20, registered(), False, network
    allowed = ("nvrar", "nvrar_pairs", "nvrar_halving", "nvrar_two_shot")
    for op, names in ((Op.ALL_REDUCE, allowed), (Op.REDUCE_SCATTER, ("vendor",))):
        for dtype in ("float32", "float16", "bfloat16"):
            for nbytes in SIZES:
                choice = choose(CollectiveProblem(op, nbytes, dtype, Topology(*facts)), "auto", "auto", ())
                assert choice.candidate.algorithm in names, (op, dtype, nbytes, choice)


def test_packaged_tables_exist() -> None:
    assert packaged("NVIDIA H200", NodeShape(1, 2), registered())
    assert packaged("NVIDIA H200", NodeShape(1, 4), registered())
