"""Workspace growth before the first call that needs a larger one.

Ranks allocate together, so an absent rank, or one that makes another call, would make the others wait in an allocation
without a deadline. Therefore they first exchange the header of the call as every call does: an absent rank is named by
the deadline.

A rank may also be late because its host waits for what another rank does after this call. So the ranks of a
non-exclusive communicator first check whether all of them arrive shortly (:class:`Growths`). If not, the workspace
stays as it is, and the call uses what fits: pieces, or the vendor library.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from shotcast.collectives.choice.resolver import ResolvedCall
from shotcast.collectives.first_use import CompiledVariant
from shotcast.collectives.interface import Executor, GrowingExecutor
from shotcast.errors import ConfigError
from shotcast.wire import Fault


def grow(
    executor: Executor,
    call: ResolvedCall,
    capturing: bool,
    compiled: Callable[[CompiledVariant, Callable[[], object]], None],
) -> Fault | bool:
    """Enlarge the workspace for ``call`` if needed. Collective: every rank makes the call.

    ``compiled(variant, load)`` returns once all ranks have loaded a kernel. Returns whether there is a new workspace,
    for calls bound from now on; or the fault that ended the header exchange. Raises ConfigError if the call is being
    captured in a graph, and on all ranks if one has too little memory.
    """
    if call.capacity <= executor.capacity:
        return False
    if capturing:
        raise ConfigError(
            f"{call.label} needs a larger workspace, which cannot be made inside a graph capture; call it once before"
        )
    assert isinstance(executor, GrowingExecutor)
    exchange = executor.header_exchange(call.plan)
    compiled(CompiledVariant("header exchange"), exchange.load)
    exchange.run()
    if fault := executor.fault():
        return fault
    executor.grow(call.capacity)
    return True


_LOOK_S = 0.001


class Growths:
    """The ranks' joint decisions on whether to grow now.

    The store serves only these ranks, which wait ``patience_s`` for each other. ``asked`` counts calls that would have
    grown the workspace, the same number on all ranks.
    """

    def __init__(self, store: dist.Store, world_size: int, patience_s: float):
        self._store, self._world_size, self._patience_s = store, world_size, patience_s
        self.asked = 0

    def all_there(self) -> bool:
        """Return, identically on all ranks, whether all of them reach this call within the patience of the first.

        Only the first, second, fourth, eighth, ... call to ask waits for the others.
        """
        self.asked += 1
        if self.asked & (self.asked - 1):
            return False
        here, decision = f"here/{self.asked}", f"decision/{self.asked}"
        if self._store.add(here, 1) == self._world_size:
            self._store.compare_set(decision, "", "grow")
        until = time.monotonic() + self._patience_s
        while not self._store.check([decision]):
            if time.monotonic() > until:
                self._store.compare_set(decision, "", "stay")
                break
            time.sleep(_LOOK_S)
        return bool(self._store.get(decision) == b"grow")
