"""Messages between two ranks, singly and in batches, on an inner group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from shotcast.errors import ConfigError
from shotcast.process_group.works import DoneWork


class GroupMessage(NamedTuple):
    """A message sent or received by this rank."""

    op: str  # `send`, `recv` or `recv_anysource`
    x: torch.Tensor
    peer: int  # the other rank; of no use where the source is any
    tag: int

    def begin(self, inner: Any) -> Any:
        """Start the message on an inner group; return the group's work."""
        if self.op == "recv_anysource":
            return inner.recv_anysource([self.x], self.tag)
        return getattr(inner, self.op)([self.x], self.peer, self.tag)


def begin_together(inner: Any, messages: Sequence[GroupMessage]) -> Any:
    """Start messages on an inner NCCL group, none of which waits for another; return the work of all."""
    inner._start_coalescing()
    try:
        for message in messages:
            message.begin(inner)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error says more
            inner._end_coalescing()
        raise
    return inner._end_coalescing()


class HeldWork(DoneWork):
    """A message in a block of calls that PyTorch coalesces; it starts when the block ends."""

    def __init__(self, message: GroupMessage):
        super().__init__([message.x])
        self.message = message
        self.begun: DoneWork | None = None

    def _found(self) -> DoneWork:
        if self.begun is None:
            raise ConfigError(
                f"{self.message.op}: a message in a block of coalesced calls begins where the block ends; wait after it"
            )
        return self.begun

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._found().wait(timeout)

    def is_completed(self) -> bool:
        return self.begun is not None and self.begun.is_completed()

    def is_success(self) -> bool:
        return self.begun is not None and self.begun.is_success()

    def exception(self) -> BaseException | None:
        return None if self.begun is None else self.begun.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._found().get_future()


class MessageBatch(NamedTuple):
    """A call of ``batch_isend_irecv`` that has started all its messages."""

    caller: Any  # its frame
    work: DoneWork  # of all the messages
    left: int  # how many of them PyTorch has yet to ask for


class OfThread(threading.local):
    """The calls that a thread is currently making."""

    works: list[DoneWork] | None = None  # of a block of calls that PyTorch coalesces; None outside
    batch: MessageBatch | None = None  # the messages that one call of `batch_isend_irecv` issues
