"""The ranks of a communicator, seen from the host: they exchange small objects through the job's key-value store."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from shotcast.errors import CollectiveTimeout
from shotcast.hardware.nodes import NodeLayout
from shotcast.memory.agreed_number import agreed_number

_LONGEST_PAUSE_S = 0.02
"""Time between two looks for a value, and for the end of the process that is to send it, at most."""


def _job_store() -> dist.Store:
    """Return the store of the job's rendezvous, for which PyTorch has no public name."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


class Meeting(NamedTuple):
    """Ranks that meet in a key-value store, before anything else joins them.

    Attributes:
        store: of which they may write every key that begins with ``shotcast/``.
        rank, world_size: among them.
        name: a name that no other ranks of the store have.
        ended: returns the ranks whose processes are known to have ended, before the ranks watch each other.
    """

    store: dist.Store
    rank: int
    world_size: int
    name: str
    ended: Callable[[], Sequence[int]] = tuple

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Meeting:
        """Return the ranks of a process group, of which this one is a member, and the job's store."""
        return cls(_job_store(), dist.get_rank(group), dist.get_world_size(group), group.group_name)


class StoreGroup:
    """A :class:`~shotcast.memory.symmetric.HostGroup` on a key-value store.

    ``steps`` is the number of exchanges that this rank has completed.

    Args:
        meeting: all the ranks, and perhaps others.
        timeout_s: the default for how long a rank is awaited.
        order: for each rank of the communicator, its rank in the meeting; None for all ranks as they are.
        name: a name that no other object of the job has, on which the ranks agree; None to agree on one now, which is
            collective.

    Raises:
        CollectiveTimeout: naming the ranks that did not come to agree on a name within ``timeout_s``.

    Attributes:
        gone: ranks whose processes have ended, for which nobody waits.
        layout: the nodes of the ranks; one node until they are known.
    """

    def __init__(self, meeting: Meeting, timeout_s: float, order: Sequence[int] | None = None, name: str | None = None):
        self._meeting = meeting
        self.order = tuple(range(meeting.world_size) if order is None else order)
        self.rank = self.order.index(meeting.rank)
        self.world_size = len(self.order)
        self._timeout_s = timeout_s
        if name is None:
            ours = dist.PrefixStore(f"shotcast/{meeting.name}", meeting.store)
            number = agreed_number(ours, self.rank, self.world_size, timeout_s, ended=meeting.ended)
            name = f"{meeting.name}/{number}"
        self.name = name
        self._store = dist.PrefixStore(f"shotcast/{name}", meeting.store)
        self.steps = 0
        self.gone: Collection[int] = ()
        self.layout = NodeLayout.one_node(self.world_size)

    def where(self, ranks: Collection[int]) -> str:
        """Return ranks in words, with their nodes; empty where all ranks are on one node."""
        return self.layout.describe(ranks) if self.layout.nodes > 1 else ""

    @property
    def meeting_point(self) -> str:
        """The host whose process has the store; empty if the ranks do not meet over a network."""
        store = self._meeting.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store.host if isinstance(store, dist.TCPStore) else ""

    def part(self, ranks: Iterable[int], name: str) -> StoreGroup:
        """Return the group of some of these ranks, in this order; this rank is one of them.

        ``name`` is one that no other part of this group has.
        """
        order = [self.order[rank] for rank in ranks]
        return StoreGroup(self._meeting, self._timeout_s, order, f"{self.name}/{name}")

    def store(self, name: str) -> dist.Store:
        """Return a part of the store that is reserved for ``name``."""
        return dist.PrefixStore(name, self._store)

    def all_gather(self, value: Any, timeout_s: float | None = None, what: str = "setup") -> list[Any]:
        """Return every rank's ``value`` (picklable), by rank.

        The timeout does not hold if the process that hosts the store is stopped: PyTorch waits for its answer without
        end.

        Raises:
            CollectiveTimeout: naming the ranks that did not arrive within ``timeout_s``. They may still arrive: this
                rank has not taken the step either, so its next call is the one that meets theirs.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        step = self.steps
        keys = [f"{step}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes
        deadline = time.monotonic() + timeout_s
        missing = [rank for rank, key in enumerate(keys) if not self._arrives(key, rank, deadline)]
        if missing:
            dead = [rank for rank in missing if rank in self.gone]
            guilty, reason = dead or missing, "dead" if dead else "late"
            raise CollectiveTimeout(self.rank, guilty, what, step, timeout_s, reason, self.where(guilty))
        values = [pickle.loads(value) for value in self._store.multi_get(keys)]
        self.steps += 1
        readers = f"{step}/readers"
        if self._store.add(readers, 1) == self.world_size:  # the last to read leaves nothing in the store
            for key in (*keys, readers):
                self._store.delete_key(key)
        return values

    def _arrives(self, key: str, rank: int, deadline: float) -> bool:
        """Return whether the value of ``rank`` arrives before the deadline and the end of its process.

        It asks again and again, as a wait that the store limits writes a warning each time.
        """
        pause = 0.0002
        while True:
            last = rank in self.gone or time.monotonic() > deadline  # it may have sent its value before its end
            if self._store.check([key]):
                return True
            if last:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def barrier(self, timeout_s: float | None = None, what: str = "barrier") -> None:
        """Wait until every rank has called. Raises CollectiveTimeout naming the ranks that did not arrive."""
        self.all_gather(None, timeout_s, what)
