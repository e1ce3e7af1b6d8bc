"""Faults become errors that name ranks, and on several nodes their nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shotcast import wire
from shotcast.collectives.faults import error_of
from shotcast.errors import CollectiveTimeout
from shotcast.hardware.nodes import NodeLayout
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.members import Members
from shotcast.wire import Fault, Op

NODES = NodeLayout.of_keys(["a", "a", "b", "b", "c", "c"])
ONE_NODE = NodeLayout.of_keys(["a"] * 6)


def group(layout: NodeLayout) -> Any:
    """Return the ranks of a job, as far as a rank's errors need them."""
    host: Any = object.__new__(StoreGroup)
    host.rank, host.world_size, host.layout = 0, layout.world_size, layout
    host.members, host.gone, host.left = Members(0), range(layout.world_size), ()
    return host


@pytest.mark.parametrize(
    ("kind", "reason"), [(wire.TIMEOUT, "late"), (wire.DEAD, "dead"), (wire.UNREACHABLE, "unreachable")]
)
def test_a_fault_names_ranks_and_their_nodes(kind: int, reason: str) -> None:
    executor: Any = SimpleNamespace(epoch=(1 << 32) + 7)
    fault = Fault.decode(wire.encode_fault(kind, int(Op.ALL_REDUCE), [3, 2, 4], (1 << 32) + 7))
    error = error_of(fault, executor, group(NODES), 2.5, ["nvrar"])
    assert isinstance(error, CollectiveTimeout)
    assert (error.missing, error.reason, error.epoch, error.timeout_s) == ((2, 3, 4), reason, (1 << 32) + 7, 2.5)
    assert error.where == "2, 3 (node b), 4 (node c)"
    assert "ranks: 2, 3 (node b), 4 (node c). The communicator is stopped" in str(error)
    alone = error_of(fault, executor, group(ONE_NODE), 2.5, ["nvrar"])
    assert isinstance(alone, CollectiveTimeout)
    assert alone.where == ""
    assert "ranks: 2, 3, 4. The communicator is stopped" in str(alone)


def test_a_rank_that_comes_to_no_meeting_is_named_with_its_node() -> None:
    host = group(NodeLayout.of_keys(["a", "b"]))
    host._store, host._timeout_s, host.steps, host.gone = dist.HashStore(), 0.05, 3, ()
    with pytest.raises(CollectiveTimeout, match=r"reset \(call 3\) did not .* missing ranks: 1 \(node b\)"):
        host.all_gather(0, what="reset")
