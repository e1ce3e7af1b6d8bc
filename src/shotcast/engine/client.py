"""The engine as its user's process sees it: ranks in processes of their own, requests in, progress out."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import NamedTuple

from shotcast import env
from shotcast.engine import rank
from shotcast.engine.config import EngineConfig
from shotcast.engine.device import resolved
from shotcast.engine.requests import EngineStats, Progress, Request, SamplingParams, output_room, token_ids
from shotcast.engine.tokenizer import Tokenizer
from shotcast.errors import ConfigError, EngineDead, RankFailed, ShotcastError, UnsupportedError
from shotcast.launcher.spawn import RankGroup
from shotcast.models.memory_estimate import require_division
from shotcast.models.source import RANDOM, open_checkpoint

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 10.0
"""From the word that it is the end to that of the processes."""


class News(NamedTuple):
    """What became of a request: its progress or the error that ended it, and when that came (perf_counter)."""

    request_id: str
    latest: Progress | Exception
    arrived: float


Listen = Callable[[list[News]], None]
"""Told on a thread of the engine's, once a step, of all requests that it listens to."""


class EngineClient:
    """Starts the ranks of an engine, passes requests to them, and says when they are gone.

    Under torchrun, rank 0 of the job starts one process, which takes its place among the ranks; the other ranks become
    ranks of the engine, and leave when it ends: for them this does not return.

    Attributes:
        config: what it was started with, and the device that was chosen.
        pids: process ids of the ranks.

    Raises:
        ConfigError: something cannot be done, which is known before or while the model is loaded.
        UnsupportedError: the model is of a kind that is not implemented.
        EngineDead: a rank ended while it loaded.
    """

    def __init__(self, config: EngineConfig):
        self.config = config = resolved(config)
        self._tokenizer: Tokenizer | ConfigError | None = None
        with contextlib.closing(open_checkpoint(config.model)) as checkpoint:  # before processes are started
            require_division(checkpoint.config, config.tensor_parallel, config.pipeline_parallel)
        self._dead: EngineDead | None = None
        self._closing = False
        self._silent = ""
        self._listeners: dict[str, Listen] = {}
        self._lock = threading.Lock()
        self._death: list[Callable[[EngineDead], None]] = []
        self._numbers = itertools.count()
        self._stats = EngineStats()
        job = env.job()
        if job is not None and job.rank != 0:
            rank.serve(config, "", b"")
            sys.exit(0)
        key = secrets.token_bytes(32)
        self._owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="shotcast-", dir=env.socket_dir())
        self._address = address = os.path.join(self._folder, "engine")
        try:
            self._listener = Listener(address, authkey=key)
            if job is None:
                self._ranks = RankGroup.start(rank.serve, config.ranks, config, address, key)
            else:
                self._ranks = RankGroup.start_in_place(rank.serve, config, address, key)
        except BaseException as error:
            if hasattr(self, "_listener"):
                self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise ConfigError(f"no socket can be made at {address}: {error}") from error
            raise
        # before multiprocessing's own end, which waits for processes that end here
        atexit.register(self.close)
        self.pids = list(self._ranks.pids)
        self._ready: rank.Ready | None = None
        self._loaded = threading.Event()
        self._accepted = False
        # to rank 0; None is the last
        self._outgoing: queue.SimpleQueue[Request | rank.Abort | rank.Stamp | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=body, name=f"shotcast-{name}", daemon=True)
            for name, body in (("watch", self._watch), ("read", self._read))
        ]
        for thread in self._threads:
            thread.start()
        try:
            if self.has_tokenizer:
                self._load_tokenizer()  # while the ranks read the model
            self._loaded.wait()
        except BaseException:
            self.close()
            raise
        if (dead := self.dead) is not None:
            self.close()
            raise dead.__cause__ if isinstance(dead.__cause__, ConfigError | UnsupportedError) else dead
        logger.info("ready after %.1f s, %.1f s of them for CUDA graphs", self.ready.load_s, self.ready.capture_s)

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> rank.Ready:
        """What the ranks have agreed on."""
        assert self._ready is not None
        return self._ready

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's. Raises ConfigError for a model that has none."""
        if isinstance(self._tokenizer, ConfigError):
            raise self._tokenizer
        return self._tokenizer or Tokenizer.load(self.config.model)

    def _load_tokenizer(self) -> None:
        try:
            self._tokenizer = Tokenizer.load(self.config.model)
        except ConfigError as error:
            self._tokenizer = error  # token ids do without

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model comes with one."""
        return not self.config.model.startswith(RANDOM) and not isinstance(self._tokenizer, ConfigError)

    @property
    def dead(self) -> EngineDead | None:
        """Why there are no ranks any more, when they went by themselves."""
        return self._dead

    @property
    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def prompt_tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The tokens of a prompt, checked.

        Raises:
            ConfigError: it is empty, too long, or holds what is no token.
        """
        tokens = token_ids(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, "the prompt")
        output_room(len(tokens), self.ready.max_model_len)
        vocab = self.ready.model.vocab
        if tokens and max(tokens) >= vocab:
            raise ConfigError(f"the prompt holds {max(tokens)}; its tokens are whole numbers from 0 to {vocab - 1}")
        return tokens

    def new_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def submit(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, listen: Listen) -> None:
        """Start a request. ``listen`` gets its progress until it has ended."""
        with self._lock:
            if self._dead is not None:
                raise self._dead
            if self._closing:
                raise EngineDead("it was closed")
            if request_id in self._listeners:
                raise ConfigError(f"there is a request {request_id!r} already")
            self._listeners[request_id] = listen
            self._outgoing.put(Request(request_id, prompt, params))

    def abort(self, request_id: str) -> None:
        """End a request; its listener hears of it. Nothing happens if it has ended."""
        with self._lock:
            if self._dead is None and not self._closing and request_id in self._listeners:
                self._outgoing.put(rank.Abort(request_id))

    def stamp_every(self, steps: int) -> None:
        """Change ``EngineConfig.stamp_every``."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ConfigError(f"stamp_every is a whole number from 0 up, not {steps!r}")
        with self._lock:
            if self._dead is None and not self._closing:
                self._outgoing.put(rank.Stamp(steps))

    def on_death(self, listen: Callable[[EngineDead], None]) -> None:
        """``listen`` is told when the ranks are gone; at once if they are."""
        with self._lock:
            if self._dead is None:
                self._death.append(listen)
                return
        listen(self._dead)

    # -- threads ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Talk with rank 0 until one of the two ends it."""
        try:
            with self._accept() as connection:
                writer = threading.Thread(target=self._write, args=(connection,), name="shotcast-write", daemon=True)
                writer.start()
                try:
                    self._hear(connection)
                finally:
                    self._outgoing.put(None)
                    writer.join()
        except (EOFError, OSError, AuthenticationError):
            return  # the other thread knows why

    def _accept(self) -> Connection:
        """Rank 0's. Nobody else comes, so the socket goes: a process that is killed later leaves no file."""
        try:
            return self._listener.accept()
        finally:
            self._accepted = True
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, connection: Connection) -> None:
        """Send what there is to send: on a thread, since a full pipe would hold up whoever asks, and its event loop."""
        going = True
        while going:
            message = self._outgoing.get()
            going = message is not None
            # a broken connection is noticed by those who watch it
            with contextlib.suppress(OSError):
                connection.send(message)

    def _hear(self, connection: Connection) -> None:
        """Pass on what rank 0 says."""
        self._ready = connection.recv()
        self._loaded.set()
        patience_s = max(self.config.timeout_s, 5 * rank.BEAT_S)
        while True:
            if not connection.poll(patience_s):
                self._silent = f"rank 0 has given no sign of life for {patience_s:g} s"
                self._ranks.kill()
                return
            message = connection.recv()
            if message is None:
                continue
            if isinstance(message, rank.Report):
                self._stats = message.stats
                self._tell(map(Progress._make, message.progress))
            else:
                assert isinstance(message, rank.Refused)
                if (listen := self._listeners.pop(message.request_id, None)) is not None:
                    listen([News(message.request_id, ConfigError(message.reason), time.perf_counter())])

    def _tell(self, step: Iterable[Progress]) -> None:
        """Each listener once: waking up a thread or an event loop takes longer than what it then does for a token."""
        arrived = time.perf_counter()
        told: dict[Listen, list[News]] = {}
        for progress in step:
            name = progress.request_id
            listen = self._listeners.get(name) if progress.finish is None else self._listeners.pop(name, None)
            if listen is not None:
                told.setdefault(listen, []).append(News(name, progress, arrived))
        for listen, news in told.items():
            listen(news)

    def _watch(self) -> None:
        """Wait for the end of the ranks, and tell everybody."""
        failure = self._ranks.wait()
        self._ranks.end()
        with self._lock:
            if self._closing:
                self._loaded.set()
                return
            self._dead = EngineDead(self._silent or _cause_of(failure))
            self._dead.__cause__ = failure.__cause__ if failure is not None and failure.__cause__ else failure
            listeners, self._listeners = self._listeners, {}
            death, self._death = self._death, []
        for name, listen in listeners.items():
            listen([News(name, self._dead, time.perf_counter())])
        for listen_death in death:
            listen_death(self._dead)
        self._loaded.set()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the ranks; requests that run end with an error. Does nothing twice, nor in a process forked from this."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        with self._lock:
            first, self._closing = not self._closing, True
            if first:
                self._outgoing.put(None)
        if not first:
            return
        watch, read = self._threads
        watch.join(_STOP_GRACE_S if self._ready is not None else 0)
        if watch.is_alive():
            self._ranks.kill()
            watch.join()
        if not self._accepted:  # the ranks never came: end the wait for them
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as nobody:
                nobody.connect(self._address)
        read.join()
        for name, listen in list(self._listeners.items()):
            listen([News(name, EngineDead("it was closed"), time.perf_counter())])


def _cause_of(failure: RankFailed | None) -> str:
    if failure is None:
        return "its ranks ended without a word"
    if isinstance(failure.__cause__, ShotcastError):
        return f"rank {failure.rank}: {failure.__cause__}"
    return str(failure)
