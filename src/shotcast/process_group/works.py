"""The results of calls: torch.distributed's ``Work`` and its future."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from shotcast.collectives.started import Handle, tensors_in
from shotcast.errors import CollectiveTimeout
from shotcast.process_group import torch_private


def seconds(timeout: timedelta | None) -> float | None:
    """Return a time limit in seconds; None for PyTorch's value that means no limit."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()


class DoneWork(torch_private.Work):
    """A finished call with a result, and the base class of others. ``result`` holds the tensors that the call wrote."""

    def __init__(self, result: Any = ()):
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the call has ended or, on GPUs, the current stream waits for it. Raises its error."""
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        return -1

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that the call writes."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=_gpus_of(self._result))
        future.set_result(self._result)
        return future


DONE = DoneWork()
"""The work of a call whose caller only needs to know that it has finished."""


class StreamWork(DoneWork):
    """A call on a GPU stream.

    ``check`` raises the error that stopped the communicator, if known; ``pending`` returns the error of a wait that
    ended before the call, given its limit in seconds.
    """

    def __init__(
        self,
        handle: Handle,
        stream: torch.cuda.Stream,
        result: Any,
        check: Callable[[], None],
        pending: Callable[[float], CollectiveTimeout],
    ):
        super().__init__(result)
        self._handle, self._stream, self._check, self._pending = handle, stream, check, pending
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if (limit := seconds(timeout)) is not None:
            until = time.monotonic() + limit
            while not self._handle.is_completed():
                if time.monotonic() > until:
                    self._check()
                    raise self._pending(limit)
                time.sleep(0.0005)
        self._handle.wait()
        self._check()
        return True

    def is_completed(self) -> bool:
        return self._handle.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self._check()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._stream.device])
            with torch.cuda.stream(self._stream):  # streams of callbacks wait for what this one has to do
                self._future.set_result(self._result)
        return self._future


class InnerWork(DoneWork):
    """A call that the inner group runs.

    ``meaning`` translates an error of the library to the error to raise; ``finish`` processes the received data.
    """

    def __init__(
        self,
        work: Any,
        result: Any,
        meaning: Callable[[Exception, float | None], Exception],
        finish: Callable[[], Any] | None = None,
    ):
        super().__init__(result)
        self._work, self._meaning, self._finish = work, meaning, finish
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._error is not None:
            raise self._error
        limit = seconds(timeout)
        try:
            done: bool = self._work.wait() if limit is None else self._work.wait(timeout)
        except RuntimeError as error:
            self._error = self._meaning(error, limit)
            if self._error is error:
                raise
            raise self._error from error
        self._arrived()
        return done

    def _arrived(self) -> None:
        """Process the received data, once; others wait for it."""
        if self._finish is not None:
            with self._lock:
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()

    def is_completed(self) -> bool:
        if self._error is not None:
            return True
        completed = bool(self._work.is_completed())
        if completed and self._finish is not None:
            self._learn()
        return completed

    def is_success(self) -> bool:
        if not self.is_completed():
            return False
        self._learn()
        return self._error is None

    def _learn(self) -> None:
        """Find out how a call has ended, with a zero-time wait, since NCCL does not support is_success()."""
        with contextlib.suppress(Exception):  # wait() keeps it
            self.wait()

    def exception(self) -> BaseException | None:
        return self._error

    def source_rank(self) -> int:
        return int(self._work._source_rank())

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future if self._finish is None else future.then(self._after)

    def _after(self, future: torch.futures.Future[Any]) -> Any:
        future.value()  # raises the error of the library
        self._arrived()
        return self._result


def inner_work(
    work: Any,
    result: Any,
    meaning: Callable[[Exception, float | None], Exception],
    finish: Callable[[], Any] | None = None,
) -> DoneWork:
    """Return the work of a call of the inner group; arguments as for :class:`InnerWork`.

    NCCL returns no work for a synchronous call, which is already on the current stream, like ours.
    """
    if work is not None:
        return InnerWork(work, result, meaning, finish)
    if finish is not None:
        finish()
    return DoneWork(result)


class SeveralWorks(DoneWork):
    """Several calls that are waited for together."""

    def __init__(self, works: Sequence[DoneWork]):
        super().__init__([tensor for work in works for tensor in work.result()])
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        together = torch.futures.collect_all([work.get_future() for work in self._works])
        return together.then(lambda _: self._result)


def _gpus_of(result: Any) -> list[int | str | torch.device]:
    return list(dict.fromkeys(one.device for one in tensors_in(result) if one.is_cuda))
