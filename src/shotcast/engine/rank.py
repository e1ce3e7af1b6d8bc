"""A rank of an engine: it loads its part of the model and computes what it is told; rank 0 also decides what."""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection
from typing import Any

from shotcast import env
from shotcast.engine.config import EngineConfig
from shotcast.engine.links import Driver, Follower
from shotcast.engine.load import Ready, load
from shotcast.engine.plan import StepPlan
from shotcast.engine.requests import EngineStats, Progress, Request
from shotcast.engine.runner import Drawing, Runner
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.errors import ConfigError

BEAT_S = 1.0
"""Between signs of life of rank 0."""
_GLANCE_S = 5e-5
"""How long a rank that reports looks out for the next step before it looks again whether the last is done."""
_STAGE_PATIENCE = 10
"""Times ``timeout_s``: what a stage waits for another, which computes meanwhile."""


@dataclass(frozen=True, slots=True)
class Report:
    """What rank 0 says after a step.

    Attributes:
        progress: each a :class:`Progress` as a plain tuple, which takes a tenth of the time to write and to read.
    """

    progress: list[tuple[Any, ...]]
    stats: EngineStats

    @classmethod
    def of(cls, progress: Iterable[Progress], stats: EngineStats) -> Report:
        return cls([tuple(one) for one in progress], stats)


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be served, and why."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """To rank 0: end a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stamp:
    """To rank 0: from now on, ``stamp_every`` is this."""

    every: int


def serve(config: EngineConfig, address: str, key: bytes) -> None:
    """Be a rank until the engine ends. ``address`` and ``key``: where rank 0 finds who asks, over a Unix socket."""
    place = env.job()
    assert place is not None
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(Client(address, authkey=key)) if place.rank == 0 else None
        runner, ready, job, comm = load(config, stack)
        gc.collect()
        gc.freeze()  # what is there now stays: looking through it takes longer than a step
        several = config.pipeline_parallel > 1
        job.set_timeout(config.timeout_s * (_STAGE_PATIENCE if several else 1))
        if several:
            comm.set_timeout(config.timeout_s)

        def check() -> None:
            """Nothing leaves that a stopped collective may have spoilt."""
            job.check()
            comm.check()

        if requests is not None:
            driver = Driver(job, config.reporter)
            stack.callback(driver.close)
            asker = Asker(requests)
            core = Core(config, ready, runner, driver, asker, check)
            asker.send(replace(ready, load_s=time.perf_counter() - started))
            asker.start()
            stack.callback(asker.stop)
            core.run()
        else:
            follower = Follower(job)
            stack.callback(follower.close)
            _follow(runner, follower, job.rank == config.reporter, check)


def _follow(runner: Runner, follower: Follower, reports: bool, check: Callable[[], None]) -> None:
    """Compute what rank 0 plans, to the end. Work for the device goes before waiting for what it has done."""
    drawings: deque[Drawing] = deque()
    while True:
        while drawings and (drawings[0].ready or not follower.waits(_GLANCE_S)):
            if not drawings[0].ready:
                continue
            drawn = drawings.popleft().result()
            check()
            follower.report(drawn)
        if (plan := follower.next()) is None:
            return
        drawing = runner.execute(plan)
        check()
        if reports:
            assert drawing is not None
            drawings.append(drawing)


class Asker:
    """Rank 0's end of the connection to whoever asks, who is given a sign of life every second."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._beat = threading.Thread(target=self._live, name="shotcast-beat", daemon=True)

    def start(self) -> None:
        self._beat.start()

    def stop(self) -> None:
        self._stopped.set()
        self._beat.join()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        with self._lock:
            self._connection.send_bytes(data)

    def poll(self) -> bool:
        return self._connection.poll()

    def recv(self) -> Any:
        return self._connection.recv()

    def _live(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                self.send(None)
            except OSError:
                return  # whoever asks is gone, which the other thread notices too


class Core:
    """Rank 0's loop: takes requests, plans steps, has them computed, and reports what was drawn."""

    def __init__(
        self,
        config: EngineConfig,
        ready: Ready,
        runner: Runner,
        driver: Driver,
        requests: Asker,
        check: Callable[[], None],
    ):
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_sequences=config.max_sequences,
                max_batch_tokens=config.max_batch_tokens,
                block_size=ready.block_size,
                num_blocks=ready.kv_blocks,
                max_model_len=ready.max_model_len,
                prefix_caching=config.prefix_caching,
                lookahead=runner.lookahead,
                pipeline=config.pipeline_parallel,
                eos=ready.model.eos,
            )
        )
        self._stamp_every = config.stamp_every
        self._runner, self._driver, self._requests = runner, driver, requests
        self._check = check
        self._patience_s = config.timeout_s * _STAGE_PATIENCE

    def run(self) -> None:
        """Return when whoever asks says that it is the end, or is gone."""
        outstanding: deque[tuple[StepPlan, Drawing | None]] = deque()
        while True:
            idle = not outstanding and not self._scheduler.unfinished
            if not self._take_requests(wait=idle):
                for _, drawing in outstanding:
                    if drawing is None:
                        self._driver.take(self._patience_s)
                self._driver.give(None)
                return
            while (plan := self._scheduler.schedule()) is not None:
                if self._stamp_every and plan.number % self._stamp_every == 0:
                    plan = plan._replace(stamped=True)
                self._driver.give(plan)
                outstanding.append((plan, self._runner.execute(plan)))
            if not outstanding:
                continue
            plan, drawing = outstanding.popleft()
            drawn = self._driver.take(self._patience_s) if drawing is None else drawing.result()
            self._check()
            assert drawn.number == plan.number
            progress = self._scheduler.update(drawn.number, drawn.tokens, drawn.logprobs)
            self._requests.send(Report.of(progress, self._stats()))

    def _stats(self) -> EngineStats:
        return replace(
            self._scheduler.stats(),
            step_s=self._runner.step_s,
            communication_s=self._runner.communication_s,
        )

    def _take_requests(self, wait: bool) -> bool:
        """Take what has been asked; False at the end."""
        try:
            while wait or self._requests.poll():
                wait = False
                message = self._requests.recv()
                if message is None:
                    return False
                if isinstance(message, Abort):
                    if (ended := self._scheduler.abort(message.request_id)) is not None:
                        self._requests.send(Report.of([ended], self._stats()))
                elif isinstance(message, Stamp):
                    self._stamp_every = message.every
                else:
                    assert isinstance(message, Request)
                    self._add(message)
        except (EOFError, ConnectionError):
            return False
        return True

    def _add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except ConfigError as error:
            self._requests.send(Refused(request.request_id, str(error)))
