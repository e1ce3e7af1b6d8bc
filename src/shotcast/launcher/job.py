"""A job whose ranks were started elsewhere, such as by torchrun on several hosts.

The process of rank 0 leads. Every other rank first connects to it, reports what it was started with, and waits for the
go-ahead. Over the same connection it reports how it ended, and learns why the job ends. So all ranks reject a mismatch
together, they learn at once when one of them ends, and the error names it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn

from shotcast.env import JobEnv
from shotcast.errors import ConfigError, EngineDead, ShotcastError, UnsupportedError
from shotcast.hardware.interfaces import address_of_this_host
from shotcast.launcher.rank_handle import Failure, read_report
from shotcast.launcher.rank_process import error_report, value_report
from shotcast.launcher.tcp_channels import TcpListener, connect
from shotcast.transport.network.handshake import connection_key, new_key

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0
"""Seconds in which all ranks must join."""
_HELLO_S = 10.0
"""Seconds from a connection to the message that identifies it."""
_VERDICT_S = 5.0
"""Seconds that a failed rank waits to learn which rank was to blame."""
_LEAVE_S = 1.0
"""Seconds that a rank has to exit after learning that the job ends in order, before it is killed."""
_LINGER_S = 5.0
"""Seconds that a rank stays after a failure unless the process of rank 0 ends first.

torchrun ends all ranks of a host when one has ended, and rank 0 must notify its clients first.
"""
_SHOWN_DIFFERENCES = 4
_FACTS, _REPORT = b"f", b"r"
"""The first byte of a rank's message: its start facts, or a report of how it ended."""
_PREFIX, _LEADERS, _LEADER = "shotcast/job", "leaders", "leader"


@dataclass(slots=True, eq=False)
class RemoteRank:
    """A rank that this process did not start, as seen by the leader."""

    rank: int
    host: str  # its name
    connection: Connection  # where it reports, and hears when to begin and why the job ends
    facts: Mapping[str, str] | None = None  # what it was started with
    reported: bool = False  # it has reported a result or an exception
    failure: Failure | None = None
    left: bool = False  # it needs to be told nothing any more
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def finished(self) -> bool:
        return self.reported or self.failure is not None

    @property
    def ends(self) -> list[Any]:
        return [self.connection]

    def receive(self) -> None:
        """Receive the rank's report or, before that, its facts; or record that it is gone."""
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError):
            self.failure = Failure(f"host {self.host}: its process ended, or its host cannot be reached", killed=True)
            return
        kind, content = message[:1], message[1:]
        if kind == _FACTS:
            self.facts = json.loads(content)
            return
        self.reported = True
        _, self.failure = read_report(content)
        if self.failure is not None:
            self.failure.detail = f"host {self.host}: {self.failure.detail}"

    def tell(self, word: Word) -> None:
        """Tell the rank to begin or, once, why it must end. Any thread may call this."""
        with self._lock, contextlib.suppress(OSError):  # then it is gone
            if not self.left:
                self.left = word.reason is not None
                self.connection.send_bytes(json.dumps([word.reason, word.refused, word.decision]).encode())

    def stop_receiving(self) -> None:
        """Make :meth:`receive` see the end of the connection, from any thread. Earlier messages still arrive."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RD)


@dataclass(frozen=True, slots=True)
class Word:
    """A message from the leader: to begin (``reason`` is None), or to end."""

    reason: str | None = None  # why the job ends; "" where it ends in order
    refused: bool = False  # the configuration was refused, before the rank began
    decision: str = ""  # what rank 0 alone has decided, for the ranks that begin


class JobLeader:
    """The other ranks of a job, in the process of its rank 0. Raises ConfigError if the job has already had a leader,
    or other hosts cannot reach this one.

    Args:
        silence_s: how long another host may give no heartbeat.

    Attributes:
        members: the other ranks that have come.
        world_size: the ranks of the job.
        store: the store of the job, which must outlive the ranks.
    """

    def __init__(self, job: JobEnv, silence_s: float):
        self.members: list[RemoteRank] = []
        self.world_size = job.world_size
        self.store = _job_store(job)
        if self.store.add(_LEADERS, 1) > 1:
            raise ConfigError(
                "the ranks of this job have served already; torchrun starts them again with another store each time "
                "(--rdzv-backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment)"
            )
        key = new_key()
        try:
            address = address_of_this_host(os.environ["MASTER_ADDR"])
            self._listener = TcpListener(address, connection_key(key), silence_s)
        except ConfigError as error:
            self._refuse(str(error), True)
            raise
        self.store.set(
            _LEADER, json.dumps({"address": self._listener.address, "key": key.hex(), "host": socket.gethostname()})
        )

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Report any error raised in the block to all ranks."""
        try:
            yield
        except BaseException as error:
            self._listener.close()
            refused = isinstance(error, ConfigError | UnsupportedError)
            text = str(error) if isinstance(error, Exception) else f"rank 0 ended ({type(error).__name__})"
            text = error.reason if isinstance(error, EngineDead) else text
            self._refuse(text, refused)
            raise

    def _refuse(self, text: str, refused: bool) -> None:
        """Tell the ranks that have joined, and ranks that join later, why the job ends."""
        with contextlib.suppress(RuntimeError):  # the store is gone, which they find out
            self.store.set(_LEADER, json.dumps({"error": text, "refused": refused}))
        for member in self.members:
            member.tell(Word(text, refused))

    def gather(self, facts: Mapping[str, str], timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Wait until all ranks have joined, and compare what they were started with. Raises ConfigError if a rank did
        not join, was started with other facts than rank 0, or found an error. Raises EngineDead if a rank ended.
        """
        deadline = time.monotonic() + timeout_s
        while unknown := set(range(1, self.world_size)) - {one.rank for one in self.members if one.facts is not None}:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                ranks = ", ".join(map(str, sorted(unknown)))
                raise ConfigError(
                    f"ranks {ranks} of {self.world_size} did not come within {timeout_s:g} s; what they or their "
                    "hosts printed says why"
                )
            waiting = {member.connection.fileno(): member for member in self.members if member.facts is None}
            for end in wait([self._listener.fileno(), *waiting], remaining):
                if end == self._listener.fileno():
                    self._accept()
                    continue
                assert isinstance(end, int)
                member = waiting[end]
                member.receive()
                if member.failure is not None:
                    if isinstance(cause := member.failure.exception, ConfigError):
                        raise ConfigError(f"rank {member.rank} (host {member.host}): {cause}")
                    raise EngineDead(f"rank {member.rank}: {member.failure.detail}")
        self._listener.close()
        different = [text for member in self.members for text in _differences(member, facts)]
        if different:
            more = len(different) - _SHOWN_DIFFERENCES
            shown = "; ".join(different[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
            raise ConfigError(f"the ranks were not started alike: {shown}")

    def begin(self, decision: str = "") -> None:
        """Tell all ranks to begin, with rank 0's decisions for all."""
        for member in self.members:
            member.tell(Word(decision=decision))

    def _accept(self) -> None:
        connection = self._listener.accept(0.0)
        with contextlib.suppress(EOFError, OSError):
            if connection is not None and connection.poll(_HELLO_S):
                rank, host = json.loads(connection.recv_bytes())
                self.members.append(RemoteRank(rank, host, connection))


def _differences(member: RemoteRank, facts: Mapping[str, str]) -> Iterator[str]:
    """Yield each difference between a rank's start facts and rank 0's, in words."""
    assert member.facts is not None
    for name in dict.fromkeys((*facts, *member.facts)):
        here, there = facts.get(name, "absent"), member.facts.get(name, "absent")
        if here != there:
            yield f"{name} is {there} on rank {member.rank} (host {member.host}) and {here} on rank 0"


@dataclass(slots=True)
class JobMember:
    """Any rank of a job other than 0, in its own process: it serves until the job ends.

    Args:
        silence_s: how long the host of rank 0 may send no heartbeat.

    Attributes:
        decision: rank 0's decisions for all, once this rank has begun.
    """

    job: JobEnv
    silence_s: float
    decision: str = field(init=False, default="")
    _connection: Connection = field(init=False)
    _leader_host: str = field(init=False, default="")
    _word: Word | None = field(init=False, default=None)
    _begun: threading.Event = field(init=False, default_factory=threading.Event)
    _ended: threading.Event = field(init=False, default_factory=threading.Event)
    _alone: threading.Event = field(init=False, default_factory=threading.Event)
    _left: threading.Event = field(init=False, default_factory=threading.Event)

    def run(self, facts: Callable[[], tuple[Mapping[str, str], tuple[Any, ...]]], fn: Callable[..., Any]) -> NoReturn:
        """Join the leader, call ``fn`` when told to, and exit when it returns or the job ends. Raises ConfigError if
        this or another rank was rejected before it began. Raises SystemExit if the job has ended in order.

        Args:
            facts: returns this rank's start facts, and the arguments of ``fn``.
        """
        self._join()
        _ignore_one_signal(self.job.rank)
        threading.Thread(target=self._listen, name="shotcast-job", daemon=True).start()
        try:
            found, arguments = facts()
        except BaseException as error:
            self._left.set()  # before rank 0 answers: this rank raises what it found
            self._report(_REPORT + error_report(error))
            raise
        self._report(_FACTS + json.dumps(dict(found)).encode())
        self._begun.wait()
        if self._word is not None:
            self._left.set()
            if not self._word.reason:
                sys.exit(0)
            raise _refusal(self._word)
        try:
            value = fn(*arguments)
        except BaseException as error:
            self._fail(error)
        self._report(_REPORT + value_report(value))
        self._left.set()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(0)

    def _join(self) -> None:
        store = _job_store(self.job)
        try:
            store.wait([_LEADER], timedelta(seconds=JOIN_TIMEOUT_S))
        except RuntimeError as error:
            raise ConfigError(
                f"rank 0 has ended, or has not begun within {JOIN_TIMEOUT_S:g} s; what it printed says why"
            ) from error
        leader = json.loads(store.get(_LEADER))
        if "error" in leader:
            raise _refusal(Word(leader["error"], leader["refused"]))
        self._leader_host = leader["host"]
        key = connection_key(bytes.fromhex(leader["key"]))
        self._connection = connect(tuple(leader["address"]), key, self.silence_s, JOIN_TIMEOUT_S)
        self._report(json.dumps([self.job.rank, socket.gethostname()]).encode())

    def _report(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the thread that listens finds out that the leader is gone
            self._connection.send_bytes(message)

    def _fail(self, error: BaseException) -> NoReturn:
        """Report an error, and end this process once the rank to blame is known."""
        text = "".join(traceback.format_exception(error))
        if Failure(text, error).consequence <= 1 and not isinstance(error, ShotcastError):
            logger.critical("rank %d failed: %s", self.job.rank, text)
        self._report(_REPORT + error_report(error))
        if self._ended.wait(_VERDICT_S):
            self._alone.wait()
        else:
            logger.critical("rank %d ends: %s: %s", self.job.rank, type(error).__name__, error)
        _leave(1)

    def _listen(self) -> None:
        """Wait for the leader's messages on a thread, since the rank may be stuck in a call that never returns."""
        word = Word()
        while word.reason is None:
            try:
                word = Word(*json.loads(self._connection.recv_bytes()))
            except (EOFError, OSError):
                word = Word(f"rank 0 (host {self._leader_host}): its process ended, or its host cannot be reached")
            if word.reason is not None:
                self._word = word
                self._ended.set()
            else:
                self.decision = word.decision
            self._begun.set()
        if self._left.wait(0 if word.reason else _LEAVE_S):
            return
        if word.reason:
            logger.critical("rank %d ends: %s", self.job.rank, word.reason)
            with contextlib.suppress(OSError):
                self._connection.poll(_LINGER_S)
        self._alone.set()
        if not self._left.is_set():
            _leave(1 if word.reason else 0)


def _refusal(word: Word) -> ShotcastError:
    """Return the error of a rank that ends before it has begun."""
    return (ConfigError if word.refused else EngineDead)(word.reason or "")


def _leave(code: int) -> NoReturn:
    """End this process at once: threads of a broken job may block an orderly exit, which is not needed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ignore_one_signal(rank: int) -> None:
    """Ignore the first SIGINT or SIGTERM, since rank 0 also gets it and ends all ranks in order. A second one exits."""

    def ignore(number: int, frame: Any) -> None:
        logger.warning("rank %d goes on until rank 0 ends; a second %s ends it", rank, signal.Signals(number).name)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, ignore)


def _job_store(job: JobEnv) -> dist.Store:
    """Return a part of the store of the job's rendezvous, which the leader hosts unless torchrun does."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://", job.rank, job.world_size, timeout=timedelta(seconds=JOIN_TIMEOUT_S)))
    return dist.PrefixStore(_PREFIX, store)
