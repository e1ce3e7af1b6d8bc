"""The client of the engine core: it starts the ranks in separate processes, and talks to rank 0."""

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
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from shotcast import env, extras
from shotcast.engine import worker
from shotcast.engine.config import EngineConfig, max_model_len_of
from shotcast.engine.grammar import MOST_MATCHERS, QUICK_S, Grammar, GrammarChecker, Vocabulary
from shotcast.engine.messages import (
    HEARTBEAT_S,
    AbortRequest,
    AddEndTokens,
    EngineCoreOutputs,
    EngineInfo,
    RejectedRequest,
    SetStampEvery,
)
from shotcast.engine.output_processor import OutputProcessor
from shotcast.engine.outputs import EngineCoreOutput, EngineStats
from shotcast.engine.requests import CheckedPrompt, Request, max_output_tokens
from shotcast.engine.sampling_params import SamplingParams, checked_token_ids
from shotcast.engine.startup import require_ranks, select_device, start_facts
from shotcast.engine.tokenizer import Tokenizer
from shotcast.errors import ConfigError, EngineDead, RankFailed, ShotcastError, UnsupportedError
from shotcast.launcher import rank_server
from shotcast.launcher.job import JobLeader, JobMember
from shotcast.launcher.spawn import RankGroup
from shotcast.models.config import ModelConfig
from shotcast.models.generation_config import FILE, read_sampling_defaults
from shotcast.models.memory_estimate import require_division
from shotcast.models.source import RANDOM, locate, open_checkpoint

if TYPE_CHECKING:
    from shotcast.engine.layout_choice import LayoutChoice

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 10.0
"""Seconds that the ranks have to exit after being told to."""


class RequestUpdate(NamedTuple):
    """An update of a request: a step's output or the error that ended it, and its arrival time by perf_counter."""

    request_id: str
    result: EngineCoreOutput | Exception
    arrived: float


_Outgoing = Request | AbortRequest | AddEndTokens | SetStampEvery | Vocabulary | Grammar | None
"""Messages to rank 0; None is the last one."""

UpdateCallback = Callable[[list[RequestUpdate]], None]
"""Called on a client thread, once per step, with the updates of all requests that share the callback."""


class EngineClient:
    """Starts the ranks of an engine, passes requests to them, and notices when they end: the base of LLM and AsyncLLM.

    Under torchrun, on one host or on several, rank 0 of the job starts one process, which takes its place among the
    ranks; the other ranks become ranks of the engine, and exit when it ends: for them this constructor does not return.
    All ranks must pass the same options and the same model.

    Raises ConfigError, before or during model loading, if the configuration cannot be served. Raises UnsupportedError
    if the kind of model is not implemented. Raises EngineDead if a rank ended while loading the model.

    Args:
        model, options: as in :class:`EngineConfig`.
    """

    config: EngineConfig
    """The configuration of the engine, with the selected device and layout."""

    layout_choice: LayoutChoice | None = None
    """The reason for the layout if ``layout="auto"`` chose it; else None."""

    sampling_defaults: Mapping[str, Any]
    """Default sampling parameters by name, from ``generation_config.json``."""

    pids: list[int]
    """Process ids of the ranks."""

    dead: EngineDead | None = None
    """Why the engine has died; None while it is alive, and after it was closed."""

    _info: EngineInfo

    def __init__(self, model: str | PathLike[str], **options: Any):
        config = EngineConfig.from_options(model, **options)
        began = time.perf_counter()
        job = env.job()
        if job is not None and job.rank != 0:
            _serve_as_member(config, JobMember(job, config.timeout_s))
        leader = JobLeader(job, config.timeout_s) if job is not None else None
        with leader.refusing() if leader is not None else contextlib.nullcontext():
            self._start(config, leader)
        graphs = f", {self._info.capture_s:.1f} s of them for CUDA graphs" if self.config.device == "cuda" else ""
        logger.info("the engine started in %.1f s%s", time.perf_counter() - began, graphs)

    def _start(self, config: EngineConfig, leader: JobLeader | None) -> None:
        rank_server.start_for_engine()
        self.config = config = select_device(config)
        self._tokenizer: Tokenizer | ConfigError | None = None
        self._checker: GrammarChecker | ConfigError = ConfigError("the model has no tokenizer, which grammars need")
        located = _located(config)  # once: a name of the Hub may come to mean other files
        self._model = located.model
        with contextlib.closing(open_checkpoint(self._model)) as checkpoint:  # before processes are started
            model = checkpoint.config
        max_model_len_of(config, model)
        if not config.plans_layout:
            require_division(model, config.tensor_parallel, config.pipeline_parallel)
        if config.speculation is not None and config.speculation.model:
            from shotcast.engine.startup import require_draft

            require_draft(located, model)
        self.sampling_defaults = _sampling_defaults(located)
        if leader is not None:
            leader.gather(start_facts(located))
        if config.plans_layout:
            # an engine that is told its layout needs no planner
            from shotcast.engine.layout_choice import choose_layout

            self.layout_choice = choose_layout(config, model)
            logger.info("%s", self.layout_choice)
            self.config = config = config.divided(str(self.layout_choice.layout))
            located = located.divided(config.layout)
        if leader is not None:
            require_ranks(config, leader.world_size)
        self._closing = False
        self._timeout_reason = ""
        self._callbacks: dict[str, UpdateCallback] = {}
        self._lock = threading.Lock()
        self._death: Future[EngineDead] = Future()
        self._next_id = itertools.count()
        self._stats = EngineStats()
        key = secrets.token_bytes(32)
        self._owner_pid = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="shotcast-", dir=env.socket_dir())
        self._address = address = os.path.join(self._folder, "engine")
        try:
            self._listener = Listener(address, authkey=key)
            if leader is None:
                self._ranks = RankGroup.start(worker.worker_main, config.ranks, located, address, key)
            else:
                self._ranks = RankGroup.start_in_place(
                    leader, worker.worker_main, located, address, key, decision=config.layout
                )
        except BaseException as error:
            if hasattr(self, "_listener"):
                self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise ConfigError(f"no socket can be made at {address}: {error}") from error
            raise
        # This runs before the exit handler of multiprocessing, which waits for the processes that end here.
        atexit.register(self._close)
        self.pids = list(self._ranks.pids)
        self._loaded = threading.Event()
        self._accepted = False
        self._outgoing: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"shotcast-{name}", daemon=True)
            for name, target in (("watch", self._watch_ranks), ("read", self._communicate))
        ]
        for thread in self._threads:
            thread.start()
        try:
            if self._has_tokenizer:
                self._load_tokenizer(model)  # while the ranks read the model
            self._loaded.wait()
        except BaseException:
            self._close()
            raise
        if (dead := self.dead) is not None:
            self._close()
            raise dead.__cause__ if isinstance(dead.__cause__, ConfigError | UnsupportedError) else dead

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError for a model without one."""
        if isinstance(self._tokenizer, ConfigError):
            raise self._tokenizer
        return self._tokenizer or Tokenizer.load(self._model)

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of a prompt and its output."""
        return self._info.max_model_len

    @property
    def vocab(self) -> int:
        """The number of tokens that the model may sample."""
        return self._info.model.vocab

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters for requests that give none."""
        return SamplingParams(**self.sampling_defaults)

    def stats(self) -> EngineStats:
        """Return the engine's counters as of the last step."""
        return self._stats

    def __repr__(self) -> str:
        config = self.config
        state = "closed" if self._closing else "running" if self.dead is None else "dead"
        layout = f"layout={config.tensor_parallel}x{config.pipeline_parallel}"
        return f"{type(self).__name__}({config.model!r}, {layout}, device={config.device}, {state})"

    @property
    def _end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text, according to the model's configuration and its tokenizer."""
        own = self._tokenizer.eos if isinstance(self._tokenizer, Tokenizer) else ()
        return tuple(dict.fromkeys((*self._info.model.eos, *own)))

    def _load_tokenizer(self, model: ModelConfig) -> None:
        try:
            self._tokenizer = Tokenizer.load(self._model)
            self._outgoing.put(AddEndTokens(self._tokenizer.eos))
        except ConfigError as error:
            self._tokenizer = error  # prompts of token ids do not need one
            return
        try:
            extras.require("engine", "a grammar")
            ends = tuple(token for token in dict.fromkeys((*model.eos, *self._tokenizer.eos)) if token < model.vocab)
            vocabulary = Vocabulary(self._tokenizer.to_json(), model.vocab, ends)
            self._checker = GrammarChecker(vocabulary)
            self._outgoing.put(vocabulary)
        except ConfigError as error:
            self._checker = error

    @property
    def _has_tokenizer(self) -> bool:
        return not self.config.model.startswith(RANDOM) and not isinstance(self._tokenizer, ConfigError)

    def check_prompt(self, prompt: str | Sequence[int]) -> CheckedPrompt:
        """Check a prompt and return its token ids, for one request or several. Raises ConfigError if the prompt is
        empty, too long, or contains values that are not token ids.

        Any thread may call this; tokenizing and checking a long prompt takes time.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = checked_token_ids(ids, "the prompt")
        max_output_tokens(len(tokens), self._info.max_model_len)
        if max(tokens) >= self.vocab:
            raise ConfigError(f"the prompt holds {max(tokens)}; its token ids must be from 0 to {self.vocab - 1}")
        return CheckedPrompt(tokens)

    def _check_params(self, params: SamplingParams) -> None:
        """Check the tokens and the grammar in sampling parameters. Any thread may call this; a grammar may take a
        while. Raises ConfigError if a token is not in the vocabulary, or the grammar cannot be compiled.
        """
        for name, token in params.named_tokens:
            if token >= self.vocab:
                raise ConfigError(f"{name} holds {token}; its token ids must be from 0 to {self.vocab - 1}")
        if params.grammar is not None:
            self.check_grammar(params.grammar)

    def check_grammar(self, grammar: Grammar) -> None:
        """Check that a grammar can be compiled, and have the ranks compile it. Any thread may call this. Raises
        ConfigError if the grammar cannot be compiled, or the model's tokenizer does not support grammars.
        """
        if isinstance(self._checker, ConfigError):
            raise self._checker
        if seconds := self._checker.check(grammar):
            self._outgoing.put(replace(grammar, matchers=MOST_MATCHERS if seconds < QUICK_S else 1))
            time.sleep(seconds)  # the ranks take about as long, and a step that samples by the grammar would wait

    def _new_id(self) -> str:
        return f"request-{next(self._next_id)}"

    def _submit(
        self,
        prompt: str | Sequence[int] | CheckedPrompt,
        params: SamplingParams,
        request_id: str,
        on_update: UpdateCallback,
        detokenize_at_end: bool = False,
    ) -> OutputProcessor:
        """Start a request whose updates go to ``on_update``; return the object that turns them into its output."""
        if params.is_constrained:
            self._check_params(params)
        tokens = (prompt if isinstance(prompt, CheckedPrompt) else self.check_prompt(prompt)).tokens
        tokenizer = self.tokenizer if isinstance(prompt, str) or params.stop or self._has_tokenizer else None
        processor = OutputProcessor(request_id, tokens, params, tokenizer, self._end_tokens, detokenize_at_end)
        self._send(request_id, tokens, params, on_update)
        return processor

    def _send(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, on_update: UpdateCallback
    ) -> None:
        """Send a request to rank 0. ``on_update`` gets its updates until it ends."""
        with self._lock:
            if self.dead is not None:
                raise self.dead
            if self._closing:
                raise EngineDead("it was closed")
            if request_id in self._callbacks:
                raise ConfigError(f"there is a request {request_id!r} already")
            self._callbacks[request_id] = on_update
            self._outgoing.put(Request(request_id, prompt, params))

    def _abort(self, request_id: str) -> None:
        """Abort a request; its callback gets a last update. Does nothing if the request has ended."""
        with self._lock:
            if self.dead is None and not self._closing and request_id in self._callbacks:
                self._outgoing.put(AbortRequest(request_id))

    # -- threads ------------------------------------------------------------------------------------------------------

    def _communicate(self) -> None:
        """Exchange messages with rank 0 until either side ends the connection."""
        try:
            with self._accept() as connection:
                writer = threading.Thread(target=self._write, args=(connection,), name="shotcast-write", daemon=True)
                writer.start()
                try:
                    self._read(connection)
                finally:
                    self._outgoing.put(None)
                    writer.join()
        except (EOFError, OSError, AuthenticationError):
            return  # the thread that watches the ranks finds out why

    def _accept(self) -> Connection:
        """Accept the connection of rank 0.

        No other connection follows, so the socket is removed: a process killed later leaves no file behind.
        """
        try:
            return self._listener.accept()
        finally:
            self._accepted = True
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, connection: Connection) -> None:
        """Send outgoing messages. Runs on a separate thread, since a full pipe would block the caller's event loop."""
        open_ = True
        while open_:
            message = self._outgoing.get()
            open_ = message is not None
            # the other threads notice a broken connection
            with contextlib.suppress(OSError):
                connection.send(message)

    def _read(self, connection: Connection) -> None:
        self._info = connection.recv()
        self._loaded.set()
        timeout_s = max(self.config.timeout_s, 5 * HEARTBEAT_S)
        while True:
            if not connection.poll(timeout_s):
                self._timeout_reason = f"rank 0 has given no sign of life for {timeout_s:g} s"
                self._ranks.kill(self._timeout_reason)
                return
            message = connection.recv()
            if message is None:
                continue
            if isinstance(message, EngineCoreOutputs):
                self._stats = message.stats
                self._dispatch(map(EngineCoreOutput._make, message.outputs))
            else:
                assert isinstance(message, RejectedRequest)
                if (on_update := self._callbacks.pop(message.request_id, None)) is not None:
                    on_update([RequestUpdate(message.request_id, ConfigError(message.reason), time.perf_counter())])

    def _dispatch(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Call each callback once per step.

        Waking up a thread or an event loop takes longer than its work for a token.
        """
        arrived = time.perf_counter()
        updates_of: dict[UpdateCallback, list[RequestUpdate]] = {}
        for output in outputs:
            name = output.request_id
            on_update = self._callbacks.get(name) if output.finish_reason is None else self._callbacks.pop(name, None)
            if on_update is not None:
                updates_of.setdefault(on_update, []).append(RequestUpdate(name, output, arrived))
        for on_update, updates in updates_of.items():
            on_update(updates)

    def _watch_ranks(self) -> None:
        """Wait for the ranks to end, and notify all callbacks."""
        failure = self._ranks.wait()
        reason = self._timeout_reason or _reason(failure)
        self._ranks.end("" if self._closing else reason)
        with self._lock:
            if self._closing:
                self._loaded.set()
                return
            self.dead = EngineDead(reason)
            self.dead.__cause__ = failure.__cause__ if failure is not None and failure.__cause__ else failure
            callbacks, self._callbacks = self._callbacks, {}
        for name, on_update in callbacks.items():
            on_update([RequestUpdate(name, self.dead, time.perf_counter())])
        self._death.set_result(self.dead)
        self._loaded.set()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """End the ranks; running requests end with an error.

        A second call does nothing, nor does a call in a forked process.
        """
        if os.getpid() != self._owner_pid:
            return
        atexit.unregister(self._close)
        with self._lock:
            first, self._closing = not self._closing, True
            if first:
                self._outgoing.put(None)
        if not first:
            return
        if isinstance(self._checker, GrammarChecker):
            self._checker.close()
        watch, read = self._threads
        watch.join(_STOP_GRACE_S if self._loaded.is_set() else 0)
        if watch.is_alive():
            self._ranks.kill()
            watch.join()
        if not self._accepted:  # the ranks have not connected: end the wait for them
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as placeholder:
                placeholder.connect(self._address)
        read.join()
        for name, on_update in list(self._callbacks.items()):
            on_update([RequestUpdate(name, EngineDead("it was closed"), time.perf_counter())])


def _located(config: EngineConfig) -> EngineConfig:
    """Return the configuration with its models as paths, so that each process finds the same files."""
    located = replace(config, model=locate(config.model))
    if config.speculation is not None and config.speculation.model:
        draft = replace(config.speculation, model=locate(config.speculation.model))
        located = replace(located, speculative_config=draft)
    return located


def _serve_as_member(config: EngineConfig, member: JobMember) -> NoReturn:
    """Serve rank 0 of the job until it ends, in its layout."""

    def facts() -> tuple[Mapping[str, str], tuple[EngineConfig]]:
        selected = _located(select_device(config))
        return start_facts(selected), (selected,)

    def serve(config: EngineConfig) -> None:
        worker.worker_main(config.divided(member.decision) if config.plans_layout else config, "", b"")

    member.run(facts, serve)


def _sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """Read the default sampling parameters from the model's files. Raises ConfigError if they are invalid."""
    defaults = read_sampling_defaults(config.model, config.generation_config)
    try:
        if SamplingParams(**defaults).max_tokens == 0:
            raise ConfigError("max_new_tokens must be at least 1, not 0")
    except ConfigError as error:
        raise ConfigError(f"{FILE} of the model: {error}; generation_config=none ignores it") from error
    if defaults:
        shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
        logger.info("requests that do not say otherwise have %s, by %s", shown, FILE)
    return defaults


def _reason(failure: RankFailed | None) -> str:
    if failure is None:
        return "its ranks ended without an error message"
    if isinstance(failure.__cause__, ShotcastError):
        return f"rank {failure.rank}: {failure.__cause__}"
    return f"rank {failure.rank} failed: {failure.detail}"
