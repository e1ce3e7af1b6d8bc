"""Asynchronous calls: on a separate stream on GPUs, on a separate thread on CPU ranks."""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shotcast.memory.block_heap import record_use
from shotcast.memory.streams import capturing, current_device, current_stream

logger = logging.getLogger(__name__)

Make = Callable[[], Any]
"""Makes a call and returns its result."""


class Handle:
    """An asynchronous call: a result that will arrive. The base class is the handle of a finished call."""

    def __init__(self, result: Any = None):
        self.result = result

    call = ""
    """The name of the call."""

    def is_completed(self) -> bool:
        """Return whether the call has finished, with a result or an error. Always False for captured calls."""
        return True

    def wait(self) -> Any:
        """Return the result of the call. On GPUs the current stream waits for it, but the host does not.

        Raises the call's error, if any. May be called repeatedly.
        """
        return self.result

    def __repr__(self) -> str:
        return f"Handle({self.call}, {self._state()})"

    def _state(self) -> str:
        return "over" if self.is_completed() else "under way"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results: bare, or in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


# -- GPUs -------------------------------------------------------------------------------------------------------------


class _StreamHandle(Handle):
    def __init__(self, result: Any, event: Any, device: torch.device, captured: bool, operands: Any):
        super().__init__(result)
        self._event, self._device, self._captured = event, device, captured
        # in a capture, memory is not to be used again before the streams join
        self._operands = operands if captured else None

    def is_completed(self) -> bool:
        return not self._captured and not capturing() and bool(self._event.query())

    def wait(self) -> Any:
        stream = current_stream(self._device)
        stream.wait_event(self._event)
        if not self._captured:
            for tensor in tensors_in(self.result):
                record_use(tensor, stream)
        self._operands = None
        return self.result


class StreamStarter:
    """Runs calls on a stream, one after the other; each waits for the pending work of the current stream.

    Calls of the communicator on other streams wait for the ones started before them.
    """

    thread_id = None
    """Calls do not run on a separate thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self.stream = torch.cuda.Stream(device)

    def start(self, make: Make, operands: Any) -> Handle:
        """Run a call on the stream; ``operands`` holds its tensors."""
        # PyTorch's context managers and its checks of torch.device arguments would take 90 us on the host
        if current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self.start(make, operands)
        captured = capturing()
        caller = current_stream(self._device)
        self.stream.wait_stream(caller)
        torch.cuda.set_stream(self.stream)
        try:
            result = make()
            event = self.stream.record_event()
        finally:  # a call that fails may have begun to use its tensors
            torch.cuda.set_stream(caller)
            if not captured:
                for tensor in tensors_in(operands):
                    record_use(tensor, self.stream)
        return _StreamHandle(result, event, self._device, captured, operands)

    def is_current(self) -> bool:
        """Return False: calls do not run on a separate thread."""
        return False

    def settle(self) -> None:
        """Do nothing: streams keep the order of calls."""

    def close(self) -> None:
        """Do nothing: the communicator waits for its calls on all streams."""


# -- CPU ranks --------------------------------------------------------------------------------------------------------


class Outcome:
    """The outcome of a call on a thread, separate from its handle: error tracebacks refer to the thread's frames."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self._unseen = False
        self._dropped = False

    def run(self, make: Make) -> None:
        try:
            self.result = make()
        except BaseException as error:  # given to the thread that waits
            self.error, self._unseen = error, True
        finally:
            self.over.set()
            if self._dropped:
                self._log()

    def seen(self) -> BaseException | None:
        """Return the error of a finished call, marking it as reported."""
        self._unseen = False
        return self.error

    def get(self) -> Any:
        """Return the result or raise the error, once the call is over."""
        self.over.wait()
        if (error := self.seen()) is not None:
            raise error
        return self.result

    def drop(self) -> None:
        """Record that nobody can ask for the result anymore."""
        self._dropped = True
        if self.over.is_set():
            self._log()

    def _log(self) -> None:
        if self._unseen:
            self._unseen = False
            logger.error("an asynchronous call failed, and was dropped without wait(): %s", self.error)


class _HostHandle(Handle):
    def __init__(self, outcome: Outcome):
        super().__init__()
        self._outcome = outcome

    def is_completed(self) -> bool:
        return self._outcome.over.is_set()

    def wait(self) -> Any:
        return self._outcome.get()

    def _state(self) -> str:
        error = self._outcome.error
        return super()._state() if error is None else f"failed with {type(error).__name__}"

    def __del__(self) -> None:
        self._outcome.drop()


def in_this_state(make: Make) -> Make:
    """Return a function that runs a call on another thread with this thread's autograd and autocast state."""
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    cast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def alike() -> Any:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
            torch.autocast("cpu", dtype, enabled=cast),
        ):
            return make()

    return alike


class Worker:
    """A thread that does the work in its ``queue`` in order, until it reads None, which ``close`` enqueues.

    ``close`` is called when nothing refers to this anymore.
    """

    def __init__(self, name: str):
        self.queue: queue.SimpleQueue[Make | None] = queue.SimpleQueue()
        # a daemon: a call that waits for ranks that never come must not keep the process from ending
        self.thread = threading.Thread(target=_serve, args=(self.queue,), name=name, daemon=True)
        self.thread.start()
        self.close = weakref.finalize(self, self.queue.put, None)


def _serve(waiting: queue.SimpleQueue[Make | None]) -> None:
    while (work := waiting.get()) is not None:
        try:
            work()
        except Exception:
            logger.exception("work that was posted to a lane raised")  # what comes next must not wait for ever
        del work  # its tensors are released now, not with the next work


_AT_EXIT_S = 1.0
"""Seconds that process exit waits for calls in progress."""


class ThreadStarter:
    """Runs calls on a thread, one after the other: calls of CPU ranks block, but let other threads run.

    The thread ends with :meth:`close`, or when nothing refers to this anymore. ``begun`` is called when the first call
    becomes outstanding, and ``ended`` when all have finished.
    """

    def __init__(self, begun: Callable[[], None] | None = None, ended: Callable[[], None] | None = None):
        self._begun, self._ended = begun, ended
        self._worker = Worker("shotcast started calls")
        self._worker.close.atexit = False
        self.thread_id = self._worker.thread.ident
        self._last: Outcome | None = None
        self._lock = threading.Lock()  # held while calls are awaited: one more thread waits for them too
        _STARTERS.add(self)

    def start(self, make: Make, operands: Any) -> Handle:
        """Run a call on the thread, with the caller's autograd and autocast state."""
        return _HostHandle(self.issue(in_this_state(make)))

    def issue(self, make: Make) -> Outcome:
        """Run a call on the thread, with any autograd and autocast state."""
        outcome = Outcome()
        with self._lock:
            if self._last is None and self._begun is not None:
                self._begun()
            self._last = outcome
            self._worker.queue.put(functools.partial(outcome.run, make))
        return outcome

    def is_current(self) -> bool:
        """Return whether this is the thread that runs the calls, such as in a callback at the end of one."""
        return threading.get_ident() == self.thread_id

    def settle(self) -> None:
        """Wait for all asynchronous calls, so that another call may follow them."""
        if self._last is None or self.is_current():
            return
        with self._lock:
            if self._last is not None:
                self._last.over.wait()
                self._last = None
                if self._ended is not None:
                    self._ended()

    def serve_until(self, over: threading.Event) -> None:
        """Run calls on their thread, from within one of them, until an asynchronous one has finished."""
        while not over.is_set():
            work = self._worker.queue.get()
            if work is None:  # the thread ends: nothing comes any more
                self._worker.queue.put(None)
                return
            work()
            del work

    def settle_until(self, until: float) -> None:
        """Wait for the asynchronous calls, at most until this point of ``time.monotonic``."""
        last = self._last
        if last is not None and self._worker.thread.is_alive():  # it does not live in a forked process
            last.over.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the thread after the pending calls."""
        self._worker.close()


_STARTERS: weakref.WeakSet[ThreadStarter] = weakref.WeakSet()


@atexit.register
def _settle_at_exit() -> None:
    """Let calls finish that are about to: a thread that returns to a finalizing interpreter aborts the process."""
    until = time.monotonic() + _AT_EXIT_S
    for starter in list(_STARTERS):
        starter.settle_until(until)
