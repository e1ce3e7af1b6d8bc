"""Lanes: concurrent computation and communication, on GPU streams or on threads of a CPU rank."""

from __future__ import annotations

import abc
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.collectives.started import Worker, in_this_state, tensors_in
from shotcast.errors import ClosedError, ConfigError
from shotcast.memory.block_heap import record_use
from shotcast.overlap.schedule import COMPUTE_LANE

logger = logging.getLogger(__name__)

Work = Callable[[], Any]


class Lanes(abc.ABC):
    """One lane of computation and one or more of communication, each with a communicator.

    A lane runs its work in the order of submission. Lanes wait for each other through events: one lane records an event
    after its work so far, and another waits for it before its next work.

    Attributes:
        communicators: the communicator of each lane of communication, reserved for it while work is in progress.
        ahead: communication is submitted before the computation that it waits for.
    """

    ahead: bool

    def __init__(self, communicators: Sequence[Communicator]):
        if not communicators:
            raise ConfigError("overlap needs a communicator")
        self.communicators = tuple(communicators)

    @property
    def count(self) -> int:
        """The number of lanes of communication."""
        return len(self.communicators)

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin submitting work; lane 0 is where the caller's computation runs now."""

    @abc.abstractmethod
    def event(self) -> Any:
        """Create an event."""

    @abc.abstractmethod
    def record(self, lane: int, event: Any) -> None:
        """Signal ``event`` when the work of ``lane`` so far has finished."""

    @abc.abstractmethod
    def wait(self, lane: int, event: Any) -> None:
        """Make ``lane`` wait until ``event`` has been signaled."""

    @abc.abstractmethod
    def call(self, lane: int, work: Work) -> None:
        """Run ``work`` on ``lane``."""

    def share(self, result: Any) -> None:  # noqa: B027
        """Make tensors returned by a communication available to the computation; threads need nothing for that."""

    @abc.abstractmethod
    def finish(self, error: BaseException | None) -> None:
        """End the use that :meth:`begin` started. After the ``error`` of a computation, drop work that has not begun.

        Raises the error of a communication, if there was one.
        """

    def close(self) -> None:  # noqa: B027
        """End the threads, but leave the communicators open. A second call does nothing."""


# -- GPUs -------------------------------------------------------------------------------------------------------------


HIGH, LOW = -1, 0
"""Stream priorities."""


def one_hardware_queue() -> str:
    """Return why, according to the environment, streams of this process cannot run concurrently; empty if they can."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue, where communication waits for "
            "computation that was launched before it; unset it before CUDA starts"
        )
    return ""


class StreamLanes(Lanes):
    """Lanes on the current stream and one communication stream. They also work inside a graph capture.

    Steps are enqueued in schedule order, and the host never waits. The communication stream has the priority ``HIGH``
    or ``LOW``. ``streams`` has the functions of ``torch.cuda`` for streams and events.
    """

    ahead = False

    def __init__(self, comm: Communicator, priority: int = HIGH, streams: Any = torch.cuda):
        super().__init__((comm,))
        self._cuda, self._device = streams, comm.device
        self._stream = streams.Stream(comm.device, priority=priority)
        self._lanes: Any = None  # the streams, while work is submitted
        self._events: list[Any] = []
        self._used = 0
        if why := one_hardware_queue():
            logger.warning("no overlap: %s", why)

    def begin(self) -> None:
        current = self._cuda.current_stream(self._device)
        if current == self._stream:
            raise ConfigError("the current stream is that of communication; overlap is not nested")
        self._lanes, self._used = (current, self._stream), 0

    def event(self) -> Any:
        # a wait is for the state of an event at that time, so the next run may record the same events again
        if self._used == len(self._events):
            self._events.append(self._cuda.Event())
        self._used += 1
        return self._events[self._used - 1]

    def record(self, lane: int, event: Any) -> None:
        event.record(self._lanes[lane])

    def wait(self, lane: int, event: Any) -> None:
        self._lanes[lane].wait_event(event)

    def call(self, lane: int, work: Work) -> None:
        if lane == COMPUTE_LANE:
            work()
            return
        with self._cuda.stream(self._stream):
            work()

    def share(self, result: Any) -> None:
        current = self._lanes[COMPUTE_LANE]
        for tensor in tensors_in(result):
            if tensor.is_cuda:
                record_use(tensor, current)

    def finish(self, error: BaseException | None) -> None:
        current, own = self._lanes
        self._lanes = None
        if error is not None:  # a capture ends with no stream left over, and memory is not used again too early
            current.wait_stream(own)


# -- CPU ranks --------------------------------------------------------------------------------------------------------


class _Run:
    """The state of one use of the lanes, from begin to finish."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[threading.Event] = []
        self.error: BaseException | None = None

    def event(self) -> threading.Event:
        event = threading.Event()
        with self._lock:
            self._events.append(event)
            if self.error is not None:
                event.set()
        return event

    def fail(self, error: BaseException) -> None:
        """Keep the first error, and release all waiters."""
        with self._lock:
            if self.error is None:
                self.error = error
            for event in self._events:
                event.set()


class ThreadLanes(Lanes):
    """Lanes on the caller's thread and one more thread per communicator.

    Calls of CPU ranks block, but compiled host code runs without the interpreter lock, like PyTorch's operators.

    Args:
        communicators: one CPU communicator per lane of communication. Several keep several messages in flight: if a
            network's delay is longer than a computation, a single lane would wait (:meth:`Communicator.split`).
    """

    ahead = True

    def __init__(self, communicators: Sequence[Communicator]):
        super().__init__(communicators)
        self._workers = [Worker(f"shotcast overlap {number}") for number in range(len(communicators))]
        self._run = _Run()
        self._used = threading.Lock()

    def begin(self) -> None:
        if not self._workers[0].close.alive:
            raise ClosedError("these lanes were closed")
        if not self._used.acquire(False):
            raise ConfigError("the lanes are in use; overlap is not nested")

    def event(self) -> threading.Event:
        return self._run.event()

    def record(self, lane: int, event: threading.Event) -> None:
        if lane == COMPUTE_LANE:
            event.set()
        else:
            self._workers[lane - 1].queue.put(event.set)

    def wait(self, lane: int, event: threading.Event) -> None:
        if lane != COMPUTE_LANE:
            self._workers[lane - 1].queue.put(event.wait)
            return
        event.wait()
        if self._run.error is not None:
            raise self._run.error

    def call(self, lane: int, work: Work) -> None:
        run = self._run
        if lane == COMPUTE_LANE:
            if run.error is not None:
                raise run.error
            work()
            return
        alike = in_this_state(work)

        def guarded() -> None:
            if run.error is None:
                try:
                    alike()
                except BaseException as error:
                    run.fail(error)

        self._workers[lane - 1].queue.put(guarded)

    def finish(self, error: BaseException | None) -> None:
        run = self._run
        try:
            if error is not None:
                run.fail(error)
            if error is None or isinstance(error, Exception):  # an interrupted caller does not wait
                over = [threading.Event() for _ in self._workers]
                for worker, event in zip(self._workers, over, strict=True):
                    worker.queue.put(event.set)
                for event in over:
                    event.wait()
            if error is None and run.error is not None:
                raise run.error
        finally:
            self._run = _Run()
            self._used.release()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def lanes_of(communicators: Communicator | Sequence[Communicator], priority: int = HIGH) -> Lanes:
    """Create lanes for these communicators: streams for GPU communicators, otherwise threads.

    Raises:
        ConfigError: there are several communicators on GPUs, where two kernels that wait for peers could deadlock.
    """
    chosen = (communicators,) if isinstance(communicators, Communicator) else tuple(communicators)
    if chosen and chosen[0].device.type == "cuda":
        if len(chosen) > 1:
            raise ConfigError("on GPUs, communication has one lane and one communicator")
        return StreamLanes(chosen[0], priority)
    return ThreadLanes(chosen)
