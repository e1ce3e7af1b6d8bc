"""The engine core: the loop on rank 0 that schedules steps, runs them on all ranks, and reports their outputs."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from shotcast.engine.config import EngineConfig
from shotcast.engine.grammar import Grammar, Vocabulary
from shotcast.engine.messages import (
    HEARTBEAT_S,
    AbortRequest,
    AddEndTokens,
    EngineCoreOutputs,
    EngineInfo,
    RejectedRequest,
    SetStampEvery,
)
from shotcast.engine.outputs import EngineStats, ModelRunnerOutput
from shotcast.engine.requests import Request
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.step_plan import StepPlan
from shotcast.errors import ConfigError

STAGE_TIMEOUTS = 10
"""A pipeline stage waits ``timeout_s`` times this for another stage, which may be computing."""


class ClientConnection:
    """Rank 0's end of the connection to the engine's client, with a heartbeat every second."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="shotcast-heartbeat", daemon=True)

    def start_heartbeat(self) -> None:
        self._heartbeat.start()

    def stop_heartbeat(self) -> None:
        self._stopped.set()
        self._heartbeat.join()

    def send(self, message: Any) -> None:
        """Send a message. Several threads may call this."""
        data = pickle.dumps(message)
        with self._lock:
            self._connection.send_bytes(data)

    def poll(self) -> bool:
        return self._connection.poll()

    def recv(self) -> Any:
        return self._connection.recv()

    def _send_heartbeats(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            try:
                self.send(None)
            except OSError:
                return  # the client is gone, which the main thread notices too


class PendingOutput(Protocol):
    """The output of a step that may still be computed."""

    def result(self) -> ModelRunnerOutput: ...


class Runner(Protocol):
    """Rank 0's part of each step: a :class:`~shotcast.engine.model_runner.ModelRunner`, or a simulation of one."""

    @property
    def step_s(self) -> float: ...
    @property
    def communication_s(self) -> float: ...
    def execute(self, plan: StepPlan) -> PendingOutput | None: ...


class PlanChannel(Protocol):
    """The channel to the other ranks: :class:`~shotcast.engine.rank_channels.DriverChannel`, or a simulation of it."""

    def send_plan(self, plan: StepPlan | None) -> None: ...
    def recv_output(self, timeout_s: float) -> ModelRunnerOutput: ...


class Requests(Protocol):
    """The channel to the engine's client: a :class:`ClientConnection`, or a simulation of one."""

    def poll(self) -> bool: ...
    def recv(self) -> Any: ...
    def send(self, message: Any) -> None: ...


def scheduler_config(config: EngineConfig, info: EngineInfo, lookahead: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prompt_step_tokens=config.max_step_tokens,
        block_size=config.block_size,
        num_blocks=info.kv_blocks,
        max_model_len=info.max_model_len,
        prefix_caching=config.prefix_caching,
        lookahead=lookahead,
        pipeline=config.pipeline_parallel,
        eos=info.model.eos,
    )


class EngineCore:
    """The loop of rank 0: takes requests, plans steps, runs them, and reports the sampled tokens.

    :mod:`shotcast.simulator.serving` runs the same loop in simulated time.

    Args:
        check: raises if a failed collective may have corrupted the results.
        stage_timeout_s: how long rank 0 waits for the output of another stage.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        channel: PlanChannel,
        client: Requests,
        check: Callable[[], None],
        stamp_every: int,
        stage_timeout_s: float,
    ):
        self._scheduler = scheduler
        self._stamp_every = stamp_every
        self._runner, self._channel, self._client = runner, channel, client
        self._check = check
        self._stage_timeout_s = stage_timeout_s

    def run(self) -> None:
        """Serve requests until the client ends the engine or disappears."""
        outstanding: deque[tuple[StepPlan, PendingOutput | None]] = deque()
        while True:
            idle = not outstanding and not self._scheduler.unfinished
            if not self._take_messages(wait=idle):
                for _, pending in outstanding:
                    if pending is None:
                        self._channel.recv_output(self._stage_timeout_s)
                self._channel.send_plan(None)
                return
            while (plan := self._scheduler.schedule()) is not None:
                if self._stamp_every and plan.number % self._stamp_every == 0:
                    plan = plan._replace(stamped=True)
                self._channel.send_plan(plan)
                outstanding.append((plan, self._runner.execute(plan)))
            if not outstanding:
                continue
            _, pending = outstanding.popleft()
            output = self._channel.recv_output(self._stage_timeout_s) if pending is None else pending.result()
            self._check()
            self._client.send(EngineCoreOutputs.pack(self._scheduler.update(output), self._stats()))

    def _stats(self) -> EngineStats:
        runner = self._runner
        return replace(self._scheduler.stats(), step_s=runner.step_s, communication_s=runner.communication_s)

    def _take_messages(self, wait: bool) -> bool:
        """Process the client's messages that have arrived. Return False when the engine should stop.

        Args:
            wait: wait for a message if none has arrived.
        """
        try:
            while wait or self._client.poll():
                wait = False
                message = self._client.recv()
                if message is None:
                    return False
                if isinstance(message, AbortRequest):
                    if (aborted := self._scheduler.abort(message.request_id)) is not None:
                        self._client.send(EngineCoreOutputs.pack([aborted], self._stats()))
                elif isinstance(message, AddEndTokens):
                    self._scheduler.add_end_tokens(message.tokens)
                elif isinstance(message, Vocabulary | Grammar):
                    plan = StepPlan(-1, (), prepares=message)
                    self._channel.send_plan(plan)
                    self._runner.execute(plan)
                elif isinstance(message, SetStampEvery):
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
            self._client.send(RejectedRequest(request.request_id, str(error)))
