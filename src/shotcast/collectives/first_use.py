"""Compilation before first use, outside any deadline."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from shotcast.collectives.interface import Executor
from shotcast.errors import CollectiveTimeout
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.members import WaitLog, wait_text

_COMPILE_LIMIT_S = 300.0
"""The time limit for a live rank that compiles: far longer than any compilation."""
_MESSAGE_PATIENCE_S = 5.0
"""The time limit for the partner of the first message of a kind while it is not compiling."""
_NOTICE_S = 1.0
"""Time within which other ranks learn that a process has ended."""
_HEADERS_AFTER_S = 0.5
"""Time after which a rank checks whether others have begun another call."""


class CompiledVariant(NamedTuple):
    """Kernels that must be compiled for a call.

    For a message, ``partner`` is the rank at the other end and ``partner_name`` names the variant that it needs.
    """

    name: str
    partner: int = -1
    partner_name: str = ""


class CompileBarrier:
    """Make ranks wait until all have compiled what a call needs: all ranks, or the two ends of a message.

    A rank reports through the job's store what it compiles, and later that it is ready or has failed. The others wait
    for a compiling rank unless its process ends, and for an absent one until the deadline, which counts only while no
    rank compiles. No rank waits for one that makes another call, which the header exchange of this call names, nor once
    a fault has stopped the calls.

    Args:
        patience_s: how long to wait for a rank that has not begun to compile; None for the deadline. After that the
            call begins, and waits for that rank on the GPU, because its host may be waiting for what this rank does
            after the call.

    Attributes:
        known: the variants that all ranks have compiled, and the message variants that this rank has compiled. A failed
            call does not count: after a reset, the ranks meet again.
    """

    def __init__(self, host: StoreGroup, executor: Executor, patience_s: float | None = None):
        self._host, self._executor, self._patience_s = host, executor, patience_s
        self._store: dist.Store = host.store("first-use")
        self.known: set[CompiledVariant] = set()

    def __call__(self, variant: CompiledVariant, compile_it: Callable[[], object], what: str, timeout_s: float) -> None:
        """Run ``compile_it`` once for each ``variant``, then wait as described above.

        Raises CollectiveTimeout if a rank is dead, or did not arrive within ``timeout_s``. ``what`` names the operation
        in errors.
        """
        if variant in self.known:
            return
        self.known.add(variant)
        met = False
        try:
            met = self._compile_and_meet(variant, compile_it, what, timeout_s)
        except dist.DistError as error:  # the process that hosted the store may have been a rank
            if dead := self._dead_soon():
                raise self._timeout(dead, what, timeout_s, "dead") from error
            raise
        finally:
            if not met:
                self.known.discard(variant)

    def _compile_and_meet(
        self, variant: CompiledVariant, compile_it: Callable[[], object], what: str, timeout_s: float
    ) -> bool:
        """Return whether the ranks can skip the barrier for ``variant`` from now on."""
        own = self._host.rank
        begun = f"begun/{variant.name}/{own}"
        self._store.set(begun, "")
        self._store.set(f"now/{own}", json.dumps([variant.partner, variant.name, variant.partner_name or variant.name]))
        try:
            try:
                compile_it()
            except BaseException:
                self._store.delete_key(begun)  # the others wait for a rank that does not compile
                raise
            self._store.set(f"ready/{variant.name}/{own}", "")
            return self._meet(variant, what, timeout_s)
        finally:
            self._store.set(f"now/{own}", "")

    def _dead_soon(self) -> list[int]:
        """Return the ranks whose processes have ended or are about to end."""
        deadline = time.monotonic() + _NOTICE_S
        while not self._host.gone and time.monotonic() < deadline:
            time.sleep(0.01)
        return sorted(self._host.gone)

    def _meet(self, variant: CompiledVariant, what: str, timeout_s: float) -> bool:
        """Wait until every rank that the call needs is ready or will not arrive. Returns whether all arrived.

        Ranks that exchange messages need not arrive: a sender may be far ahead of its receiver. Nor need ranks that are
        not waited for until the deadline.
        """
        message = variant.partner >= 0
        awaited = [(variant.name, rank) for rank in range(self._host.world_size)]
        if message:
            awaited = [(variant.partner_name, variant.partner)]
        goes_on = message or self._patience_s is not None
        limit_s = _MESSAGE_PATIENCE_S if message else self._patience_s
        patience_s = timeout_s if limit_s is None else min(timeout_s / 2, limit_s)
        waited = compiled = 0.0
        pause, looked, log = 0.0005, time.monotonic(), WaitLog()
        while late := [rank for name, rank in awaited if not self._store.check([f"ready/{name}/{rank}"])]:
            gone = [rank for rank in late if rank in self._host.gone]
            # asked again: a rank may have become ready, and left after its part of the call
            dead = [rank for name, rank in awaited if rank in gone and not self._store.check([f"ready/{name}/{rank}"])]
            if self._executor.stopped:  # asked after: a rank that ends has told its fault before, which is the cause
                return message
            if dead:
                raise self._timeout(dead, what, timeout_s, "dead")
            if any(self._elsewhere(rank) for rank in late):
                return message
            if waited > _HEADERS_AFTER_S and not message and self._in_a_call(late):
                return False
            if waited > patience_s or compiled > _COMPILE_LIMIT_S:
                if goes_on:
                    return True
                raise self._timeout(late, what, timeout_s, "late")
            log.look(waited, functools.partial(self._text, late, what, waited, timeout_s))
            time.sleep(pause)
            pause, before, looked = min(2 * pause, 0.02), looked, time.monotonic()
            if any(self._store.check([f"begun/{name}/{rank}"]) for name, rank in awaited if rank in late):
                compiled += looked - before
            else:
                waited += looked - before
        return True

    def _elsewhere(self, rank: int) -> bool:
        """Return whether ``rank`` waits for this one in another call, which this rank does not make first.

        Two ranks that both send before they receive would wait for each other in this way.
        """
        key = f"now/{rank}"
        now = self._store.get(key) if self._store.check([key]) else b""
        if not now:
            return False
        partner, name, awaited = json.loads(now)
        ours = partner in (-1, self._host.rank)
        return ours and all(one.name != awaited for one in self.known) and self._store.check([f"ready/{name}/{rank}"])

    def _in_a_call(self, ranks: list[int]) -> bool:
        """Return whether one of ``ranks`` has begun this call, as a different one whose kernels it already has."""
        if not self._executor.idle():
            return False  # calls before this one are under way, so its number is not known
        headers = self._executor.headers(self._executor.epoch + 1)
        return any(headers[rank] is not None for rank in ranks)

    def _text(self, ranks: list[int], what: str, waited_s: float, timeout_s: float) -> str:
        return wait_text(self._host.members, ranks, what, self._executor.epoch + 1, waited_s, timeout_s)

    def _timeout(self, ranks: list[int], what: str, timeout_s: float, reason: str) -> CollectiveTimeout:
        return self._host.timeout(ranks, what, self._executor.epoch + 1, timeout_s, reason)
