"""A rank of an engine: it loads its part of the model and computes what it is told; rank 0 also decides what."""

from __future__ import annotations

import contextlib
import gc
import logging
import pickle
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection
from typing import Any

import torch

from shotcast import env
from shotcast.collectives.communicator import MAX_WORKSPACE_MESSAGE, Communicator
from shotcast.engine.config import EngineConfig
from shotcast.engine.links import Driver, Follower
from shotcast.engine.plan import StepPlan
from shotcast.engine.requests import EngineStats, Progress, Request
from shotcast.engine.runner import Drawing, Runner
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.steps import bucket_sizes, token_sizes
from shotcast.errors import ConfigError
from shotcast.layers.clock import DeviceClock, HostClock
from shotcast.layers.parallel import Parallel
from shotcast.layers.weights import Weights
from shotcast.models.config import ModelConfig
from shotcast.models.llama import Llama
from shotcast.models.memory import available_bytes, weight_bytes
from shotcast.models.source import open_checkpoint
from shotcast.units import format_size

logger = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 8192
_CPU_SHARE = 4
"""Of the memory that weights leave of a machine, the cache takes one in so many: others work there too."""
BEAT_S = 1.0
"""Between signs of life of rank 0."""
_LOADING_S = 600.0
"""What ranks wait for each other while they load, which takes some longer than others."""
_GLANCE_S = 5e-5
"""How long a rank that reports looks out for the next step before it looks again whether the last is done."""
_STAGE_PATIENCE = 10
"""Times ``timeout_s``: what a stage waits for another, which computes meanwhile."""
_SEQUENCE_PARALLEL_FROM = 64
"""Tokens of a step from which the residual is divided."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What an engine is once all ranks have loaded: told to whoever started it."""

    model: ModelConfig
    max_model_len: int
    kv_blocks: int
    block_size: int
    device: str
    dtype: str
    load_s: float
    capture_s: float


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
        runner, ready, job, comm = _load(config, stack)
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

        reporter = _reporter(config)
        if requests is not None:
            driver = Driver(job, reporter)
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
            _follow(runner, follower, job.rank == reporter, check)


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


def _reporter(config: EngineConfig) -> int:
    """The rank that tells rank 0 what was drawn: the first of the last stage."""
    return config.ranks - config.tensor_parallel


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
                # A GPU has its next step before the host knows what the last one drew; the token goes from one to the
                # other on the device. Between stages it would have to travel, and there are other sequences to compute.
                lookahead=int(ready.device == "cuda" and config.pipeline_parallel == 1),
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


def _load(config: EngineConfig, stack: contextlib.ExitStack) -> tuple[Runner, Ready, Communicator, Communicator]:
    """This rank's part of the model, ready to run; all ranks agree on the rest."""
    checkpoint = open_checkpoint(config.model, _device_of(config))
    stack.callback(checkpoint.close)
    model = checkpoint.config
    limit = min(model.max_position, DEFAULT_MODEL_LEN)
    max_model_len = config.max_model_len or limit
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model was made for at most {model.max_position} tokens"
        )
    device = config.device
    dtype_name = config.dtype or ("float32" if device == "cpu" else "bfloat16")
    dtype: torch.dtype = getattr(torch, dtype_name)
    budget = _memory_budget(config, model, dtype)
    job = stack.enter_context(
        Communicator(
            device=device,
            max_bytes=_workspace_bytes(config, model, dtype),
            timeout_s=max(config.timeout_s, _LOADING_S),
        )
    )
    if job.world_size != config.ranks:
        raise ConfigError(
            f"tensor_parallel x pipeline_parallel is {config.tensor_parallel} x {config.pipeline_parallel}, but "
            f"the job has {job.world_size} ranks"
        )
    comm = job
    if config.pipeline_parallel > 1:
        split = job.split(job.rank // config.tensor_parallel)
        assert split is not None
        comm = stack.enter_context(split)
    sequence_parallel = _SEQUENCE_PARALLEL_FROM if config.sequence_parallel else 0
    clock = DeviceClock(job.device) if device == "cuda" else HostClock()
    parallel = Parallel(comm, job, config.pipeline_parallel, config.algorithm, sequence_parallel, clock)
    with _progress(config.progress and job.rank == 0, budget.weights) as on_read:
        part = Llama(
            model,
            Weights(checkpoint, dtype, job.device, on_read, config.quantization),
            parallel,
            max_model_len,
            config.max_sequences,
        )
    bytes_a_block = _bytes_a_block(part, config.block_size)
    left = budget.available - budget.weights
    room = config.kv_cache_bytes or (left if device == "cuda" else left // _CPU_SHARE)
    least = -(-max_model_len // config.block_size)
    blocks = min(config.max_sequences * least, room // bytes_a_block)
    blocks = int(job.all_gather(torch.tensor([blocks], device=job.device)).min())
    if blocks < least:
        raise ConfigError(
            f"the cache has room for {blocks * config.block_size} tokens ({format_size(room)}), fewer than one "
            f"sequence of max_model_len {max_model_len} needs; lower max_model_len or give it more memory "
            "(kv_cache_bytes, memory_fraction)"
        )
    salt = torch.tensor([config.seed if config.seed is not None else secrets.randbits(62)], device=job.device)
    job.broadcast(salt, 0)
    static = bucket_sizes(config.max_sequences) if device == "cuda" else ()
    prompts = token_sizes(config.max_batch_tokens) if device == "cuda" else ()
    limits = blocks, config.block_size, config.max_sequences, max_model_len
    runner = Runner(part, *limits, int(salt), static, prompts, job.rank == _reporter(config))
    stack.callback(runner.close)
    started = time.perf_counter()
    runner.capture(stamped=config.stamp_every > 0)
    capture_s = time.perf_counter() - started
    ready = Ready(model, max_model_len, blocks, config.block_size, device, dtype_name, 0.0, capture_s)
    return runner, ready, job, comm


def _workspace_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """The longest message of the engine's collectives, or what a communicator takes at most."""
    largest = config.max_batch_tokens * model.hidden
    if config.device == "cuda":  # where longer messages would not go by own kernels: the logits of a step
        largest = max(largest, config.max_sequences * model.vocab)
    return min(max(1 << 20, largest * dtype.itemsize), MAX_WORKSPACE_MESSAGE)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes of a rank: what there is for weights and cache, and what its weights take."""

    available: int
    weights: int


def _device_of(config: EngineConfig) -> torch.device:
    """This rank's."""
    job = env.job()
    return torch.device(config.device, job.local_rank) if config.device == "cuda" and job else torch.device("cpu")


def _memory_budget(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> _Memory:
    """Raises ConfigError, before anything is read, if the weights do not fit, or a cache of ``kv_cache_bytes``."""
    sharers = config.ranks if config.device == "cpu" else 1
    free = available_bytes(_device_of(config)) // sharers
    available = int(free * config.memory_fraction)
    layout = config.tensor_parallel, config.pipeline_parallel
    weights = weight_bytes(model, dtype.itemsize, *layout, config.quantization)
    kind = config.quantization or str(dtype).removeprefix("torch.")
    taken = f"the weights of a rank take {format_size(weights)} as {kind}"
    has = f"it has {format_size(available)} ({config.memory_fraction:.0%} of {format_size(free)} free"
    has += f", shared by {sharers} ranks)" if sharers > 1 else ")"
    if weights > available:
        smaller = "another dtype" if config.device == "cpu" else "quantization fp8"
        raise ConfigError(
            f"{taken}; {has}. Use more ranks, {'' if config.quantization else f'{smaller} '}or another model"
        )
    if config.kv_cache_bytes > available - weights:
        raise ConfigError(
            f"{taken}, and kv_cache_bytes is {format_size(config.kv_cache_bytes)}; {has}. kv_cache_bytes may be "
            f"{available - weights} at most; 0 takes what there is"
        )
    return _Memory(available, weights)


def _bytes_a_block(model: Llama, block_size: int) -> int:
    one = model.caches(1, block_size)
    return sum(tensor.numel() * tensor.element_size() for cache in one for tensor in (cache.keys, cache.values))


@contextlib.contextmanager
def _progress(shown: bool, nbytes: int) -> Iterator[Callable[[int], Any]]:
    """A bar for so many bytes, on standard error."""
    if not shown:
        yield lambda read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=nbytes)
        yield lambda read: bar.advance(task, read)
