"""Host-side communication of a communicator's ranks: they exchange small objects through the job's key-value store."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from shotcast.errors import CollectiveTimeout
from shotcast.hardware.nodes import NodeLayout
from shotcast.memory.agreed_number import agreed_number
from shotcast.memory.members import Members, WaitLog, departed, wait_text

_LONGEST_PAUSE_S = 0.02
"""The maximum interval between checks for a value, and for the end of the process that should send it."""
_NEWS_S = 0.2
"""Time within which this rank learns why another is gone, after a third rank has noticed."""


class Rendezvous(NamedTuple):
    """Ranks that meet in a key-value store before anything else connects them."""

    store: dist.Store  # of which they may write every key that begins with `shotcast/`
    rank: int  # among them
    world_size: int
    name: str  # a name that no other ranks of the store have
    # returns the ranks that are known to come no more, before the ranks watch each other
    ended: Callable[[], Sequence[int]] = tuple
    left: Callable[[], Collection[int]] = tuple  # returns those of them that have left, though their processes live on
    ranks: tuple[int, ...] = ()  # the rank in the job of each of them; empty where they are known by their ranks here
    group: str = ""  # what people call them; empty for all ranks of the job
    advice: str = ""  # what errors say to do once a call has stopped them; empty for a communicator, which can be reset

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Rendezvous:
        """Build the rendezvous of a process group that includes this rank, on the job's store."""
        ranks, store = tuple(dist.get_process_group_ranks(group)), dist.distributed_c10d._get_default_store()
        title = "" if group is dist.group.WORLD else title_of(group)
        place = dist.get_rank(group), dist.get_world_size(group), group.group_name
        return cls(store, *place, ranks=ranks, group=title)

    @property
    def members(self) -> Members:
        """The ranks as named in errors."""
        return Members(self.rank, self.ranks, self.group, self.advice)


def title_of(group: dist.ProcessGroup) -> str:
    """Return the display name of a process group: its description, or else PyTorch's name for it."""
    return group.group_name if group.group_desc in ("", "undefined") else group.group_desc


class StoreGroup:
    """The ranks of a communicator, which exchange small objects through a key-value store.

    Args:
        rendezvous: a superset of the ranks.
        timeout_s: the default time to wait for a rank.
        order: the rendezvous rank of each rank of the communicator; None for all ranks in order.
        name: a unique name within the job; None to agree on one now, which is collective, and raises CollectiveTimeout
            naming the ranks that did not arrive.
        group: the display name of the ranks; None uses the rendezvous's.

    Attributes: steps: the number of exchanges that this rank has completed. gone: ranks whose processes have ended, or
    that have left, which are not waited for; ``left`` are the latter. layout: the nodes of the ranks; one node until
    they are known.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        timeout_s: float,
        order: Sequence[int] | None = None,
        name: str | None = None,
        group: str | None = None,
    ):
        self._rendezvous = rendezvous
        self.order = tuple(range(rendezvous.world_size) if order is None else order)
        self.rank = self.order.index(rendezvous.rank)
        self.world_size = len(self.order)
        known = tuple(map(rendezvous.members.known, self.order))
        self.members = Members(self.rank, known, rendezvous.group if group is None else group, rendezvous.advice)
        self._timeout_s = timeout_s
        if name is None:
            ours = dist.PrefixStore(f"shotcast/{rendezvous.name}", rendezvous.store)
            ends = rendezvous.ended, rendezvous.left
            number = agreed_number(ours, self.members, self.world_size, timeout_s, "construction", *ends)
            name = f"{rendezvous.name}/{number}"
        self.name = name
        self._store = dist.PrefixStore(f"shotcast/{name}", rendezvous.store)
        self.steps = 0
        self.gone: Collection[int] = ()
        self.left: Collection[int] = ()
        self.layout = NodeLayout.one_node(self.world_size)

    def where(self, ranks: Collection[int]) -> str:
        """Describe ranks and their nodes in words; empty if all ranks are on one node."""
        return self.layout.describe(ranks, self.members.ranks) if self.layout.nodes > 1 else ""

    def timeout(
        self, missing: Collection[int], op: str, epoch: int, timeout_s: float, reason: str = "late"
    ) -> CollectiveTimeout:
        """Return the error of a call without some ranks. Ranks reported as dead may have left."""
        guilty = list(missing)
        if reason == "dead":
            until = time.monotonic() + _NEWS_S
            while not set(guilty) <= set(self.gone) and time.monotonic() < until:
                time.sleep(0.005)
            guilty, reason = departed(guilty, self.left)
        return self.members.timeout(guilty, op, epoch, timeout_s, reason, self.where(guilty))

    @property
    def meeting_point(self) -> str:
        """The host whose process runs the store; empty if the ranks do not meet over a network."""
        store = self._rendezvous.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store.host if isinstance(store, dist.TCPStore) else ""

    def part(self, ranks: Iterable[int], name: str) -> StoreGroup:
        """Return the group of some of these ranks, including this one, in the given order; ``name`` is unique among its
        parts.
        """
        order = [self.order[rank] for rank in ranks]
        return StoreGroup(self._rendezvous, self._timeout_s, order, f"{self.name}/{name}", self.members.group)

    def store(self, name: str) -> dist.Store:
        """Return a part of the store that is reserved for ``name``."""
        return dist.PrefixStore(name, self._store)

    def all_gather(self, value: Any, timeout_s: float | None = None, what: str = "setup") -> list[Any]:
        """Return every rank's ``value`` (picklable), by rank.

        Raises CollectiveTimeout naming the ranks that did not arrive within ``timeout_s``. They may still arrive: this
        rank's next call matches theirs. The timeout does not apply if the process that hosts the store is stopped.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        step = self.steps
        keys = [f"{step}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes
        begun, log = time.monotonic(), WaitLog()

        def look() -> None:
            waited_s = time.monotonic() - begun
            log.look(waited_s, lambda: wait_text(self.members, absent(), what, step, waited_s, timeout_s))

        def absent() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

        missing = [rank for rank, key in enumerate(keys) if not self._arrives(key, rank, begun + timeout_s, look)]
        if missing:
            dead = [rank for rank in missing if rank in self.gone]
            raise self.timeout(dead or missing, what, step, timeout_s, "dead" if dead else "late")
        values = [pickle.loads(value) for value in self._store.multi_get(keys)]
        self.steps += 1
        readers = f"{step}/readers"
        if self._store.add(readers, 1) == self.world_size:  # the last to read leaves nothing in the store
            for key in (*keys, readers):
                self._store.delete_key(key)
        return values

    def _arrives(self, key: str, rank: int, deadline: float, look: Callable[[], None]) -> bool:
        """Return whether the value of ``rank`` arrives before the deadline and the end of its process. Store waits
        would log.
        """
        pause = 0.0002
        while True:
            last = rank in self.gone or time.monotonic() > deadline  # it may have sent its value before its end
            if self._store.check([key]):
                return True
            if last:
                return False
            look()
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def barrier(self, timeout_s: float | None = None, what: str = "barrier") -> None:
        """Wait until every rank has called. Raises CollectiveTimeout naming the ranks that did not arrive."""
        self.all_gather(None, timeout_s, what)
