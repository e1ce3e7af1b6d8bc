"""The calls of a process group on one device: its communicator, and their order."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.collectives.prepared import Operands, PreparedCall
from shotcast.collectives.started import Handle, Outcome, StreamStarter, ThreadStarter, in_this_state
from shotcast.errors import ClosedError, CollectiveTimeout, ShotcastError, not_made
from shotcast.memory.host_group import Rendezvous
from shotcast.process_group import torch_private
from shotcast.process_group.works import DONE, DoneWork, StreamWork, seconds

_DESTROYED = "this process group was destroyed"
Make = Callable[[Communicator], None]
"""Runs a call on a communicator."""


class DeviceCalls:
    """Runs calls on one device in the order in which threads issue them, some asynchronously.

    The first call builds the communicator, on all ranks at once. ``rendezvous`` returns the ranks, once the group has
    its name, and ``dead`` the ranks whose processes have ended. The ``lock`` is held while a call is issued.
    """

    def __init__(
        self,
        rendezvous: Callable[[], Rendezvous],
        dead: Callable[[], Sequence[int]],
        device: torch.device,
        timeout_s: float,
    ):
        self._rendezvous, self._dead, self._device, self.timeout_s = rendezvous, dead, device, timeout_s
        self._error: ShotcastError | None = None
        self.lock = threading.Lock()
        self.comm: Communicator | None = None
        self._starter: ThreadStarter | StreamStarter | None = None
        self._closed = False

    def communicator(self) -> Communicator:
        """Return the communicator; the first call builds it, which is collective."""
        if self.comm is None:
            if self._error is not None:
                raise not_made("the call", self._error) from self._error
            if self._closed:
                raise ClosedError(_DESTROYED)
            try:
                rendezvous = self._rendezvous()
                self.comm = Communicator.from_store(
                    rendezvous, self._device, timeout_s=self.timeout_s, setup_timeout_s=self.timeout_s
                )
                self.comm._prepared.counts_versions = False  # like torch.distributed
            except ShotcastError as error:  # later calls would wait as long again
                self._error = error
                raise
        return self.comm

    def again(self, op: str, key: tuple[Any, ...], operands: Operands, asynchronous: bool) -> DoneWork | None:
        """Run or start a call that the communicator has prepared; otherwise return None and do nothing.

        ``key`` holds the non-tensor arguments of the communicator's method, and ``operands`` the tensors, the last of
        which it writes. With ``asynchronous`` the caller does not wait.
        """
        comm, starter = self.comm, self._starter
        if comm is None or (starter is not None and starter.thread_id == threading.get_ident()):
            return None
        with self.lock:
            call = None if self._closed else comm._prepared.find(key, operands)
            if call is None:
                return None
            starter = self._starter
            if not asynchronous:
                if starter is not None:
                    starter.settle()
                return None if call.run(operands) is None else DONE
            result = [] if operands[-1] is None else [operands[-1]]
            if isinstance(starter, ThreadStarter):
                return ThreadWork(op, starter.issue(functools.partial(_repeat, op, comm, call, operands)), result, self)
            if starter is None:
                return None
            handle = starter.start(functools.partial(call.run, operands), operands)
            return None if handle.result is None else self._work_of(op, handle, result, comm, starter)

    def make(
        self, op: str, make: Make, result: Any, operands: Any, asynchronous: bool, timeout_s: float | None
    ) -> DoneWork:
        """Run a call, or start it.

        ``result`` holds the tensors that it writes, ``operands`` all of its tensors. ``timeout_s`` defaults to the
        group's deadline.
        """
        if timeout_s is not None and timeout_s != self.timeout_s:
            make = functools.partial(_within, timeout_s, self, make)
        if self._is_called_back():
            outcome = Outcome()
            outcome.run(lambda: make(self.communicator()))
            work = ThreadWork(op, outcome, result, self)
            if not asynchronous:
                work.wait()
            return work
        with self.lock:
            if self._closed:
                raise ClosedError(_DESTROYED)
            if asynchronous:
                return self._start(op, make, result, operands)
            if self._starter is not None:
                self._starter.settle()
            if self._device.type == "cpu":
                make(self.comm or self.communicator())
            else:
                with torch.cuda.device(self._device):
                    make(self.communicator())
        return DONE

    def _is_called_back(self) -> bool:
        """Return whether this is a callback at the end of a call that the thread has run.

        Its calls run at once, in the position of the future's completion, which is after all calls issued before the
        future was requested. No caller holds the lock at that point, except possibly one that waits for the thread.
        """
        return self._starter is not None and self._starter.is_current()

    def _start(self, op: str, make: Make, result: Any, operands: Any) -> DoneWork:
        def call() -> None:
            make(self.communicator())

        if self._device.type == "cpu":
            if self._starter is None:
                self._starter = ThreadStarter()
            assert isinstance(self._starter, ThreadStarter)
            return ThreadWork(op, self._starter.issue(in_this_state(call)), result, self)
        with torch.cuda.device(self._device):
            comm = self.communicator()  # meets the other ranks on the host
        if self._starter is None:
            self._starter = StreamStarter(self._device)
        assert isinstance(self._starter, StreamStarter)
        handle = self._starter.start(functools.partial(_result_of, call, result), operands)
        return self._work_of(op, handle, result, comm, self._starter)

    def _work_of(self, op: str, handle: Handle, result: Any, comm: Communicator, starter: StreamStarter) -> StreamWork:
        return StreamWork(handle, starter.stream, result, comm.check, functools.partial(self.pending, op))

    def behind(self, task: Callable[[], None]) -> None:
        """Run a task after the issued calls, on their thread; at once if all have finished."""
        if not self._is_called_back():
            with self.lock:
                if isinstance(self._starter, ThreadStarter) and not self._closed:
                    self._starter.start(task, ())
                    return
        task()

    def serve_until(self, over: threading.Event) -> None:
        """Run the issued calls until one has finished, if this is their thread; otherwise return at once."""
        if self._is_called_back():
            assert isinstance(self._starter, ThreadStarter)
            self._starter.serve_until(over)

    def pending(self, op: str, limit_s: float) -> CollectiveTimeout:
        """Return the error of a wait that ended before its call."""
        return self._rendezvous().members.timeout(self._dead(), op, 0, limit_s, "pending")

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        if self.comm is not None:
            self.comm.set_timeout(timeout_s)

    def close(self) -> None:
        """Wait for this rank's calls, and release their resources. A second call does nothing."""
        with self.lock:
            if self._closed:
                return
            if self._starter is not None:
                self._starter.settle()
                self._starter.close()
            self._closed = True
            if self.comm is not None:
                self.comm.close()


def _within(timeout_s: float, calls: DeviceCalls, make: Make, comm: Communicator) -> None:
    comm.set_timeout(timeout_s)
    try:
        make(comm)
    finally:
        comm.set_timeout(calls.timeout_s)


def _result_of(call: Callable[[], None], result: Any) -> Any:
    call()
    return result


def _repeat(op: str, comm: Communicator, call: PreparedCall, operands: Operands) -> None:
    if call.run(operands) is None:
        comm._refuse_if_stopped(op)
        raise ClosedError(_DESTROYED)


class ThreadWork(DoneWork):
    """A call that runs on a thread."""

    def __init__(self, op: str, outcome: Outcome, result: Any, queue: DeviceCalls):
        torch_private.Work.__init__(self)  # without a frame in between
        self._result = result
        self._op, self._queue, self._outcome = op, queue, outcome
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def __del__(self) -> None:
        self._outcome.drop()

    def wait(self, timeout: timedelta | None = None) -> bool:
        over = self._outcome.over
        if not over.is_set():
            self._queue.serve_until(over)
            limit = seconds(timeout)
            if not over.wait(limit):
                assert limit is not None
                raise self._queue.pending(self._op, limit)
        if (error := self._outcome.seen()) is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        return self._outcome.over.is_set()

    def is_success(self) -> bool:
        return self._outcome.over.is_set() and self._outcome.error is None

    def exception(self) -> BaseException | None:
        return self._outcome.seen() if self._outcome.over.is_set() else None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that the call writes; waiting for it in C++ also raises the call's error.

        Callbacks added immediately run before the calls issued next. If the call has finished, they run when added; if
        not, the future's completion takes this position among the calls. Ranks may differ in that, but not in the order
        of calls.

        C++ mistakes an exception set in Python for a result, and terminates the process; it recognizes one raised by a
        callback.
        """
        end: torch.futures.Future[None] | None = None
        with self._lock:
            if self._future is None:
                end = torch.futures.Future()
                self._future = end.then(functools.partial(_end_of, self._outcome, self._result))
        if end is not None:
            complete = functools.partial(end.set_result, None)
            self._queue.serve_until(self._outcome.over)
            if self._outcome.over.is_set():
                complete()
            else:
                self._queue.behind(complete)
        return self._future


def _end_of(outcome: Outcome, result: Any, _: torch.futures.Future[None]) -> Any:
    if (error := outcome.seen()) is not None:
        raise error
    return result
