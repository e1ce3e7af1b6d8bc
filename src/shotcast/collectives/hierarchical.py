"""All-reduce over nodes in three launches, of which the library makes the one between nodes.

It is for GPUs of several hosts that cannot put to each other: without NVSHMEM, native kernels serve the ranks of a node
alone. Its sums are rounded to the dtype after the node and by the library, so they have not the bits of the numerics
contract, and ``auto`` never takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch

from shotcast.collectives.algorithm import LIBRARY
from shotcast.collectives.communicator import Communicator
from shotcast.errors import CollectiveMismatch, CollectiveTimeout, ConfigError

T = TypeVar("T")


class HierarchicalAllReduce:
    """Sums over the ranks of a communicator: reduce-scatter in each node, all-reduce between peers, all-gather.

    The first and the last are native kernels; between nodes it is the vendor's library, on connections of each set of
    peers (the ranks of one local rank on all nodes). Construction is collective. Every rank makes the same calls in the
    same order, on CUDA on the current stream; they can be captured in a graph once one has been made.

    Args:
        comm: a communicator over several nodes of equally many ranks.

    Attributes:
        node: the communicator of this rank's node.
        peers: that of the ranks of this local rank.

    Raises:
        ConfigError: there is one node, or nodes have different numbers of ranks.
        CollectiveTimeout: a rank did not come to the construction.
    """

    def __init__(self, comm: Communicator):
        layout = comm.topology.layout
        if layout.nodes == 1 or not layout.even:
            sizes = ", ".join(
                f"{len(ranks)} on {name}" for name, ranks in zip(layout.names, layout.members, strict=True)
            )
            raise ConfigError(f"a hierarchical all-reduce takes several nodes of equally many ranks, not {sizes}")
        number, local = layout.node_of(comm.rank), layout.local_rank_of(comm.rank)
        node, peers = comm.split(number), comm.split(local)
        assert node is not None
        assert peers is not None
        self.node, self.peers = node, peers
        self._host = comm._host

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of ``x`` over all ranks, in ``out`` if it is given (which may be ``x``).

        Raises what :meth:`Communicator.all_reduce` raises, with the ranks of the communicator over all nodes.
        """
        flat = x.contiguous().view(-1)
        missing = -flat.numel() % self.node.world_size
        if missing:
            flat = torch.nn.functional.pad(flat, (0, missing))
        part = self._of(lambda: self.node.reduce_scatter(flat))
        self._of(lambda: self.peers.all_reduce(part, out=part, algorithm=LIBRARY))
        whole = self._of(lambda: self.node.all_gather(part))[: x.numel()].view(x.shape)
        return whole if out is None else out.copy_(whole)

    def check(self) -> None:
        """Raise if a call has failed, as :meth:`Communicator.check` does."""
        for comm in (self.node, self.peers):
            self._of(comm.check)

    def close(self) -> None:
        """Close both communicators. A second call does nothing."""
        self.node.close()
        self.peers.close()

    def __enter__(self) -> HierarchicalAllReduce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _of(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; an error names the group over all nodes, and the nodes of ranks."""
        members = self._host.members
        try:
            return call()
        except CollectiveTimeout as error:
            where = self._host.where([r for r in range(self._host.world_size) if members.known(r) in error.missing])
            fields = error.rank, error.missing, error.op, error.epoch, error.timeout_s, error.reason, where
            raise CollectiveTimeout(*fields, members.group, error.advice, error.refused) from error.__cause__
        except CollectiveMismatch as error:
            about = error.rank, error.calls, error.differing, error.fields, error.epoch
            raise CollectiveMismatch(*about, members.group, error.advice, error.refused) from error.__cause__
