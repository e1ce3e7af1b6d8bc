"""A communicator's vendor-library calls, subject to the communicator's deadline."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shotcast import wire
from shotcast.collectives.algorithm import Algorithms
from shotcast.collectives.call_watch import LIBRARY_CALLS
from shotcast.collectives.faults import mismatch_of
from shotcast.collectives.peer_watch import PeerWatch
from shotcast.collectives.vendor.blame import Blame
from shotcast.collectives.vendor.gloo import GlooGroup
from shotcast.collectives.vendor.interface import Begun, CallError, Connected, RefusedError, VendorGroup
from shotcast.errors import CollectiveTimeout, ShotcastError, UnsupportedError, call_text
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.members import WaitLog, wait_text
from shotcast.wire import CallPlan, Op

_CONNECT_LIMIT_S = 120.0
"""The time limit for connecting ranks that have met, which includes library setup."""
_ALARM_AFTER_S = 0.25
"""Interval between queries of the job's store for faults of other ranks."""
_SETTLE_S = 0.3
"""Time from the end of a process to the end of calls with it, which may have received all they need."""
_ELSEWHERE = "a call of another rank failed", "elsewhere"
"""The text and cause of an error."""
_OPS = {op.label: op for op in Op}
_KINDS = {"late": wire.TIMEOUT, "dead": wire.DEAD}
"""Fault kinds by verdict reason; for other reasons, the rank's kernels are interrupted."""


class Vendor:
    """Runs calls in NCCL or Gloo, on dedicated connections that end with the communicator.

    Ranks connect on the first call that needs it: all ranks for collectives, two for messages. A failed call stops the
    communicator: :meth:`check` raises on every waiting rank, and no call runs until :meth:`reset`. The communicator
    holds its lock during all methods except :meth:`check` and :meth:`look`.

    Args:
        compares: no kernel has compared the call headers, so the library does it if it can.
        stopped: returns whether native kernels have stopped the communicator.
        peers: reports failed calls of other ranks, and notifies them of this rank's.
        stop: ends native kernels that wait behind a failed call, given the fault as an abort word; None if kernels
            never outlive the host's call.

    Attributes:
        failed: a call has failed since the last reset.
        failed_first: it failed by itself, not because of a fault in native kernels, which may have ended after it.
    """

    def __init__(
        self,
        host: StoreGroup,
        device: torch.device,
        algorithms: Algorithms,
        timeout_s: float,
        library: str,
        compares: bool,
        stopped: Callable[[], bool],
        peers: PeerWatch,
        stop: Callable[[int], None] | None = None,
    ):
        self._host, self._device, self._algorithms = host, device, algorithms
        self._timeout_s, self._library = timeout_s, library
        self._compares, self._stopped, self._peers, self._stop = compares, stopped, peers, stop
        self._all = tuple(range(host.world_size))
        self._retired: list[VendorGroup] = []
        self._retired_at: list[int] = []
        self._halting = threading.Lock()
        self._gone_at: dict[int, float] = {}
        self._looked = 0.0
        self._wait: tuple[Begun, float, WaitLog] | None = None
        self.served = 0
        self._begin(0)
        if library == "nccl":
            LIBRARY_CALLS.add(self)

    def _begin(self, generation: int) -> None:
        """Start without connections; ``generation`` distinguishes them from connections before a reset."""
        self.generation = generation
        self._store = self._host.store(f"vendor/{generation}")
        self._blame = Blame(self._store, self._host.rank, self._host.gone)
        self._connected: dict[tuple[int, ...], Connected] = {}
        self._error: ShotcastError | None = None
        self._decided = threading.Event()
        self._last = Begun("a call of another rank", 0, None, self._timeout_s)
        self.failed = self.failed_first = False

    # -- calls ------------------------------------------------------------------------------------------------------

    def connected(self, plan: CallPlan) -> bool:
        return self._members(plan) in self._connected

    def _members(self, plan: CallPlan) -> tuple[int, ...]:
        if plan.op in (Op.SEND, Op.RECV):
            return tuple(sorted((self._host.rank, plan.root)))
        return self._all

    def run(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        """Run the call; ``x`` and ``out`` are contiguous, or None if the operation has none.

        Connects the ranks if needed. Raises UnsupportedError if the library cannot serve the call, CollectiveTimeout or
        CollectiveMismatch if other ranks are not in it, and ShotcastError if it failed.
        """
        self._check_own()
        members = self._members(plan)
        sent = dataclasses.replace(plan, root=self._host.rank) if plan.op is Op.SEND else plan
        header = self._algorithms.header(sent)
        known = self._connected.get(members)
        call = self._last = Begun(plan.op.label, known.calls + 1 if known else 1, header, self._timeout_s)
        begun = time.monotonic()
        if self._library == "gloo":
            self._wait = call, begun, WaitLog()
        try:
            if self._alarmed():  # the library may have what this call needs, and would go on without the others
                raise CallError(*_ELSEWHERE)
            known = known or self._connect(members, self._timeout_s)
            known.calls += 1
            if self._library == "nccl":
                known.recent.append(call)
                known.captured |= torch.cuda.is_current_stream_capturing()
            if self._compares and not known.captured:
                self._compare(known, call)
            root = members.index(plan.root) if plan.op in (Op.SEND, Op.RECV) else plan.root
            with torch.inference_mode():  # out may be a tensor of that mode; and gets no gradient of a copy
                known.group.run(dataclasses.replace(plan, root=root), x, out)
            self.served += 1
        except RefusedError as error:
            what = f"{plan.op.label}({plan.reduction}) of {plan.dtype}"
            raise UnsupportedError(f"neither native kernels nor {self._library} served {what}: {error}") from error
        except CallError as error:
            self._fail(members, call, begun, error)
            self.check()
        except dist.DistError as error:
            self._fail(members, call, begun, CallError(f"the job's store failed: {error}"))
            self.check()
        except BaseException:  # the handler of a signal may raise anything
            self._fail(members, call, begun, CallError("a signal ended it"), interrupted=True)
            raise
        finally:
            self._wait = None

    def _compare(self, known: Connected, call: Begun) -> None:
        """Compare a call's headers across its ranks. Raises CallError if they differ."""
        assert call.header is not None
        headers = dict(zip(known.members, known.group.headers(call.header), strict=False))
        if len(set(headers.values())) > 1:
            if self._halt(self.generation, tells=False):  # the others compare the same headers
                self._error = mismatch_of(self._host.members, headers, call.number, tuple(self._algorithms))
                self._decided.set()
            raise CallError("the calls differ")

    def connect(self, limit_s: float) -> None:
        """Connect all ranks, which must call this together. Raises the same errors as :meth:`run`."""
        call, begun = Begun("connecting", 0, None, limit_s), time.monotonic()
        try:
            self._connect(self._all, limit_s)
        except CallError as error:
            self._fail(self._all, call, begun, error)
            self.check()

    def _connect(self, members: tuple[int, ...], patience_s: float) -> Connected:
        """Connect ``members``. Raises CallError if one does not arrive within ``patience_s``, or ends."""
        name = "-".join(map(str, members)) if members != self._all else "all"
        store = dist.PrefixStore(name, self._store)
        self._meet(store, "come", members, patience_s)
        rank = members.index(self._host.rank)
        arguments = store, rank, len(members)

        def interrupted() -> None:
            self._interrupted(members)

        group: VendorGroup
        if self._library == "nccl":
            from shotcast.collectives.vendor.nccl import NcclGroup

            group = NcclGroup(*arguments, self._device, _CONNECT_LIMIT_S, interrupted)
        else:
            group = GlooGroup(*arguments, self._timeout_s, _CONNECT_LIMIT_S, interrupted)
        try:
            self._meet(store, "connected", members, _CONNECT_LIMIT_S)
        except BaseException:
            group.stop()
            raise
        known = self._connected[members] = Connected(group, members, self.generation)
        return known

    def _meet(self, store: dist.Store, what: str, members: tuple[int, ...], limit_s: float) -> None:
        """Wait until all ``members`` have reached this point. Raises CallError."""
        store.set(f"{what}/{self._host.rank}", "")
        until, pause = time.monotonic() + limit_s, 0.0005
        while True:
            left = [rank for rank in members if rank in self._host.left]  # before the look, as they came before
            absent = [rank for rank in members if not store.check([f"{what}/{rank}"])]
            if not absent:
                return
            if set(absent) & set(left):
                raise CallError("ranks have left")
            if time.monotonic() > until:
                raise CallError("ranks did not come to connect", "deadline")
            self._interrupted(members)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    # -- faults -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that stopped the calls of this rank or of another rank on this machine, if any."""
        if not self.failed and self._alarmed() and not self._waits():
            self._fail(self._all, self._last, time.monotonic(), CallError(*_ELSEWHERE))
        self._check_own()

    def _check_own(self) -> None:
        if self.failed:
            self._decided.wait()
            assert self._error is not None
            raise copy.copy(self._error)
        if self._replayed():
            raise ShotcastError(
                f"a graph was replayed that was captured before reset(); its calls by {self._library} did nothing: "
                f"capture it again, and reset()"
            )

    def needs_reset(self) -> bool:
        """Return whether :meth:`check` would raise."""
        return self.failed or self._alarmed() or self._replayed()

    def _alarmed(self) -> bool:
        """Return whether another rank of this machine has reported a failed call."""
        if self._connected:
            self._peers.listen()
        return self._peers.alarmed >= self.generation

    def _waits(self) -> bool:
        """Return whether this rank is in a call, which detects failures itself."""
        if self._wait is not None:
            return True
        counts = [known.group.progress() for known in self._connected.values()]
        return any(begun != ended for begun, ended in counts)

    def _replayed(self) -> bool:
        """Return whether the device has begun calls on connections that no longer exist."""
        return self._retired_at != [group.progress()[0] for group in self._retired]

    def _interrupted(self, members: tuple[int, ...]) -> None:
        """Raise CallError if a call with ``members`` must stop waiting, regardless of its deadline."""
        if self._stopped():
            raise CallError("a fault or an abort stopped the communicator")
        now = time.monotonic()
        if self._wait is not None:
            call, begun, log = self._wait
            log.look(now - begun, lambda: self._text(call, now - begun))
        for rank in members:
            if rank in self._host.left:
                continue  # it took part in all calls that it was to make, and the library tells of others
            if rank in self._host.gone and now - self._gone_at.setdefault(rank, now) > _SETTLE_S:
                raise CallError(f"the process of rank {self._host.members.known(rank)} has ended")
        if self._alarmed():
            raise CallError(*_ELSEWHERE)
        if now - self._looked > _ALARM_AFTER_S:
            self._looked = now
            if self._blame.raised():
                raise CallError(*_ELSEWHERE)

    def _fail(
        self,
        members: tuple[int, ...],
        call: Begun,
        begun: float,
        error: CallError,
        interrupted: bool = False,
        generation: int | None = None,
    ) -> None:
        """Stop after a failed call that began at the time ``begun``, and set the error that all ranks agree on.

        ``generation`` identifies the connections, which a reset may have replaced since; it defaults to the current
        one.
        """
        generation = self.generation if generation is None else generation
        if not self._halt(generation):
            return
        rank = self._host.members.own
        self._error = self._library_error(call, str(error))
        try:
            self.failed_first = not self._stopped()
            if self.failed_first:
                kind, guilty = self._settle(members, call, time.monotonic() - begun, error, interrupted)
                # a kernel that has seen the fault of which this rank heard knows more of it
                self.failed_first = not (error.cause == "elsewhere" and self._stopped())
            if not self.failed_first:
                self._error = ShotcastError(f"rank {rank}: a fault or an abort stopped the communicator in {call.op}")
            elif self._stop is not None:
                self._stop(wire.encode_fault(kind, _OPS.get(call.op, Op.BARRIER), guilty, call.number))
        finally:
            self._decided.set()

    def _settle(
        self, members: tuple[int, ...], call: Begun, waited_s: float, failure: CallError, interrupted: bool
    ) -> tuple[int, Sequence[int]]:
        """Set the error of a call that failed by itself. Return the kind of fault and the ranks it names."""
        kind, ranks = wire.INTERRUPTED, (self._host.rank,)  # what ends native kernels, where no other rank is at fault
        settled = self._stopped if failure.cause == "elsewhere" and self._stop is not None else None
        try:
            found = self._blame.verdict(members, call.header, waited_s, failure.cause, interrupted, settled)
            if found.reason == "mismatch":
                names = tuple(self._algorithms)
                self._error = mismatch_of(self._host.members, found.headers, call.number, names, found.ranks)
            elif found.reason != "library":
                self._error = self._timeout(found.ranks, call, found.reason)
                return _KINDS.get(found.reason, kind), found.ranks
        except Exception as trouble:
            # without the store, which ends or stops with the process that holds it, this rank decides alone
            self._error = self._library_error(call, f"{failure}. Who is at fault is not known: {trouble}")
            dead = [peer for peer in members if peer in self._host.gone]
            if dead:
                self._error = self._timeout(dead, call, "dead")
                return wire.DEAD, dead
        return kind, ranks

    def _timeout(self, ranks: Sequence[int], call: Begun, reason: str) -> CollectiveTimeout:
        if reason == "dead" and self._host.layout.nodes > 1 and not set(ranks) & set(self._host.gone):
            reason = "unreachable"  # connections to another node broke, and why cannot be seen from here
        return self._host.timeout(ranks, call.op, call.number, call.timeout_s, reason)

    def _library_error(self, call: Begun, detail: str) -> ShotcastError:
        members = self._host.members
        after = members.advice or "The communicator is stopped: reset() it, or close() it and build a new one"
        what = call_text(call.op, call.number, members.group)
        return ShotcastError(f"rank {members.own}: {self._library} failed in {what}: {detail}. {after}")

    def _text(self, call: Begun, waited_s: float) -> str:
        """Say that a call is waiting in the library, which does not report for which ranks."""
        return wait_text(self._host.members, (), call.op, call.number, waited_s, call.timeout_s, self._library)

    def _halt(self, generation: int, tells: bool = True) -> bool:
        """Abort all calls in progress. Returns whether this is the first fault, so that the caller sets the error.

        A fault of connections that a reset has replaced is ignored. Other ranks are notified first: an aborted NCCL
        kernel stops waiting and may send data that it has not received, so that calls of other ranks return it.
        """
        with self._halting:
            if self.failed or generation != self.generation:
                return False
            self.failed = True
        if tells:
            self._peers.alarm(generation)
        for known in list(self._connected.values()):
            known.group.stop()
        return True

    def look(self, now: float) -> None:
        """Find and abort calls on the device that must not continue. Runs on the thread of the watch."""
        if self.failed:
            return
        for known in list(self._connected.values()):
            begun, ended = known.group.progress()
            if begun == ended or begun != known.waiting:
                known.waiting, known.since, known.log = (-1 if begun == ended else begun), now, WaitLog()
                continue
            failure, call = CallError("the deadline has passed", "deadline"), known.begun(begun, self._timeout_s)
            known.log.look(now - known.since, functools.partial(self._text, call, now - known.since))
            try:
                known.group.check()
                self._interrupted(known.members)
                if now - known.since <= call.timeout_s:
                    continue
            except CallError as error:
                failure = error
            # in a thread of its own, as other communicators are to be looked at meanwhile
            arguments = known.members, call, known.since, failure, False, known.generation
            threading.Thread(target=self._fail, args=arguments, daemon=True).start()
            return

    # -- state ------------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls, and of replays of captured ones."""
        self._timeout_s = timeout_s
        if not self.failed:
            for known in self._connected.values():
                known.group.set_timeout(timeout_s)

    def reset(self, generation: int) -> None:
        """Forget all connections and the fault, with no call in progress; later calls reconnect.

        The ``generation`` is the same on all ranks, and higher than before.
        """
        with self._halting:
            self.generation = generation  # a fault of the connections so far comes too late from here on
        if self.failed:
            self._decided.wait()
        for known in self._connected.values():
            known.group.stop()
            if known.captured:
                self._retired.append(known.group)
        self._retired_at = [group.progress()[0] for group in self._retired]
        self._begin(generation)

    def close(self) -> None:
        """Drop all connections, with no call in progress. Not collective."""
        LIBRARY_CALLS.remove(self)
        for known in self._connected.values():
            known.group.close()
        self._connected = {}
