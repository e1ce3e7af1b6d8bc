"""Decide whether the workspace grows before the first call that needs a larger one.

A rank may be late because its host waits for what another rank does after this call. So the ranks of a non-exclusive
communicator first check whether all of them arrive shortly. If not, the workspace stays as it is, and the call uses
what fits: pieces, or the vendor library.
"""

from __future__ import annotations

import time

import torch.distributed as dist

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
