"""Compilation before first use, which no deadline limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

COMPILE_LIMIT_S = 300.0


class Form(NamedTuple):
    """The kernels that a call needs compiled.

    For a message, ``partner`` is the rank at the other end and ``partner_name`` names the form that it needs.
    """

    name: str
    partner: int = -1
    partner_name: str = ""


class FirstUse:
    """Make ranks meet after each has compiled what a call needs: all ranks, or the two ends of a message.

    A rank reports through the job's store that it compiles, and later that it is ready. Ranks that are ready wait for
    those that compile. A rank that reports nothing for ``patience_s`` is busy with something else, or late: then the
    call begins, and its own header exchange finds out which.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self._store, self._rank, self._world_size = store, rank, world_size
        self.known: set[Form] = set()

    def __call__(self, form: Form, compile_it: Callable[[], object], patience_s: float) -> None:
        """Run ``compile_it`` once for each ``form``, then wait as described above."""
        if form in self.known:
            return
        self.known.add(form)
        self._store.set(f"begun/{form.name}/{self._rank}", "")
        compile_it()
        self._store.set(f"ready/{form.name}/{self._rank}", "")
        awaited = [(form.name, rank) for rank in range(self._world_size)]
        if form.partner >= 0:
            awaited = [(form.partner_name, form.partner)]
        started = time.monotonic()
        for name, rank in awaited:
            pause = 0.0005
            while not self._store.check([f"ready/{name}/{rank}"]):
                waited = time.monotonic() - started
                begun = self._store.check([f"begun/{name}/{rank}"])
                if waited > (COMPILE_LIMIT_S if begun else patience_s):
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
