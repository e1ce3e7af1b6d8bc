"""The ranks of a communicator, seen from the host: small objects exchanged through the job's key-value store."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shotcast.errors import CollectiveTimeout

_built: Counter[str] = Counter()
_NAMING = threading.Lock()


def _job_store() -> dist.Store:
    """The store of the job's rendezvous. PyTorch has no public name for it."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def new_group(job_ranks: Sequence[int], name: str, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """A process group that only its members make.

    PyTorch names such a group after how many groups this process has, which is not the same on all ranks; they would
    wait for one another under different names. So ``name``, on which they agree, is put in the place of that.

    Args:
        job_ranks: the members, ascending, by rank in the job.
        name: of no other group of the job.
        backend: as ``dist.get_backend_config`` says it.
        timeout_s: of the group's operations.
    """
    from torch.distributed import distributed_c10d

    with _NAMING:
        usual, thread = distributed_c10d._process_group_name, threading.get_ident()

        def agreed(ranks: Any, use_hashed_name: bool) -> Any:
            return name if threading.get_ident() == thread else usual(ranks, use_hashed_name)

        distributed_c10d._process_group_name = agreed
        try:
            return dist.new_group(
                list(job_ranks),
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=True,
                group_desc=name,
            )
        finally:
            distributed_c10d._process_group_name = usual


class StoreGroup:
    """A :class:`~shotcast.memory.symmetric.HostGroup` over the store of a torch.distributed process group.

    Every rank builds its objects for one process group in the same order; that is what keeps their keys apart.

    Args:
        group: the process group.
        timeout_s: default for how long a rank may be awaited.
        order: rank in the process group by rank here.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, order: Sequence[int]):
        self.order = tuple(order)
        self.rank = self.order.index(dist.get_rank(group))
        self.world_size = len(self.order)
        self._timeout_s = timeout_s
        name = group.group_name
        self.name = f"{name}/{_built[name]}"  # the same on all ranks; no other object of this process has it
        self._store = dist.PrefixStore(f"shotcast/{self.name}", _job_store())
        _built[name] += 1
        self._step = 0

    def store(self, name: str) -> dist.Store:
        """A part of the job's store for ``name`` alone."""
        return dist.PrefixStore(name, self._store)

    def all_gather(self, value: Any, timeout_s: float | None = None, what: str = "setup") -> list[Any]:
        """Every rank's ``value`` (picklable), by rank.

        No timeout holds where the process of the store itself is stopped: PyTorch waits for its answer without end.

        Raises:
            CollectiveTimeout: naming the ranks that did not come within ``timeout_s``. They still may: this rank has
                not taken the step either, so its next call is the one that meets theirs.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        step = self._step
        self._store.set(f"{step}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes
        deadline = time.monotonic() + timeout_s
        values, missing = [], []
        for rank in range(self.world_size):
            key = f"{step}/{rank}"
            if self._comes(key, deadline):
                values.append(pickle.loads(self._store.get(key)))
            else:
                missing.append(rank)
        if missing:
            raise CollectiveTimeout(self.rank, missing, what, step, timeout_s)
        self._step += 1
        if step >= 2:  # everybody has come to step - 1, so everybody has read step - 2
            self._store.delete_key(f"{step - 2}/{self.rank}")
        return values

    def _comes(self, key: str, deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left > 0:
            try:
                self._store.wait([key], timedelta(seconds=max(left, 0.001)))  # 0 would be without end
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # DistStoreError of most stores; FileStore has none of its own
                pass
            else:
                return True
        return self._store.check([key])  # however long the store takes to say so: who came in time is not missing

    def barrier(self, timeout_s: float | None = None, what: str = "barrier") -> None:
        """Returns once every rank has called. Raises CollectiveTimeout naming the ranks that did not come."""
        self.all_gather(None, timeout_s, what)
