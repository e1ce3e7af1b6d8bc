"""The ranks of a communicator, seen from the host: they exchange small objects through the job's key-value store."""

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
    """Return the store of the job's rendezvous, for which PyTorch has no public name."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def new_group(job_ranks: Sequence[int], name: str, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Create a process group that only its members take part in creating.

    PyTorch names such a group after the number of groups in this process, which differs between ranks: they would wait
    for one another under different names. So this function replaces that name by ``name``, on which the ranks agree.

    Args:
        job_ranks: the members by rank in the job, ascending.
        name: a name that no other group of the job has.
        backend: as ``dist.get_backend_config`` returns it.
        timeout_s: for the group's operations.
    """
    from torch.distributed import distributed_c10d

    with _NAMING:
        original, thread = distributed_c10d._process_group_name, threading.get_ident()

        def agreed_name(ranks: Any, use_hashed_name: bool) -> Any:
            return name if threading.get_ident() == thread else original(ranks, use_hashed_name)

        distributed_c10d._process_group_name = agreed_name
        try:
            return dist.new_group(
                list(job_ranks),
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=True,
                group_desc=name,
            )
        finally:
            distributed_c10d._process_group_name = original


class StoreGroup:
    """A :class:`~shotcast.memory.symmetric.HostGroup` on the store of a torch.distributed process group.

    Every rank creates its objects for one process group in the same order, which keeps their keys apart.

    Args:
        group: the process group.
        timeout_s: the default for how long a rank is awaited.
        order: for each rank of the communicator, its rank in the process group.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, order: Sequence[int]):
        self.order = tuple(order)
        self.rank = self.order.index(dist.get_rank(group))
        self.world_size = len(self.order)
        self._timeout_s = timeout_s
        name = group.group_name
        self.name = f"{name}/{_built[name]}"  # the same on all ranks, and unique in this process
        self._store = dist.PrefixStore(f"shotcast/{self.name}", _job_store())
        _built[name] += 1
        self._step = 0

    def store(self, name: str) -> dist.Store:
        """Return a part of the job's store that is reserved for ``name``."""
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
        step = self._step
        self._store.set(f"{step}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes
        deadline = time.monotonic() + timeout_s
        values, missing = [], []
        for rank in range(self.world_size):
            key = f"{step}/{rank}"
            if self._arrives(key, deadline):
                values.append(pickle.loads(self._store.get(key)))
            else:
                missing.append(rank)
        if missing:
            raise CollectiveTimeout(self.rank, missing, what, step, timeout_s)
        self._step += 1
        if step >= 2:  # every rank has reached step - 1, so every rank has read step - 2
            self._store.delete_key(f"{step - 2}/{self.rank}")
        return values

    def _arrives(self, key: str, deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left > 0:
            try:
                self._store.wait([key], timedelta(seconds=max(left, 0.001)))  # 0 would wait without end
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # most stores raise DistStoreError; FileStore raises this
                pass
            else:
                return True
        return self._store.check([key])  # a rank that arrived in time is not missing, however late the store says so

    def barrier(self, timeout_s: float | None = None, what: str = "barrier") -> None:
        """Wait until every rank has called. Raises CollectiveTimeout naming the ranks that did not arrive."""
        self.all_gather(None, timeout_s, what)
