"""The main function of each engine rank, and the loop of all ranks except rank 0."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import TYPE_CHECKING

from shotcast import env
from shotcast.engine.config import EngineConfig
from shotcast.engine.engine_core import STAGE_TIMEOUTS, ClientConnection, EngineCore, scheduler_config
from shotcast.engine.scheduler import Scheduler
from shotcast.engine.speculation import Speculation

if TYPE_CHECKING:
    from shotcast.engine.model_runner import AsyncModelRunnerOutput, ModelRunner
    from shotcast.engine.rank_channels import WorkerChannel

_POLL_S = 5e-5
"""Seconds that a reporting rank waits for the next plan before checking again whether the last step has finished."""


def worker_main(config: EngineConfig, address: str, key: bytes) -> None:
    """Run one rank until the engine ends.

    Rank 0 plans every step and computes its part; the other ranks compute theirs.

    Args:
        address, key: the Unix socket at which rank 0 reaches the engine's client, and the connection's key.
    """
    from shotcast.engine.load import load
    from shotcast.engine.rank_channels import DriverChannel, WorkerChannel

    rank_env = env.job()
    assert rank_env is not None
    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(Client(address, authkey=key)) if rank_env.rank == 0 else None
        runner, info, world, comm = load(config, stack)
        gc.collect()
        gc.freeze()  # these objects stay for good, and a collection that visits them takes longer than a step
        pipelined = config.pipeline_parallel > 1
        world.set_timeout(config.timeout_s * (STAGE_TIMEOUTS if pipelined else 1))
        if pipelined:
            comm.set_timeout(config.timeout_s)

        def check() -> None:
            """Raise if a failed collective may have corrupted the results."""
            world.check()
            comm.check()

        if requests is not None:
            channel = DriverChannel(world, config.output_rank, config.timeout_s)
            stack.callback(channel.close)
            client = ClientConnection(requests)
            scheduler = Scheduler(scheduler_config(config, info, runner.lookahead), Speculation.of(config))
            stage_timeout_s = config.timeout_s * STAGE_TIMEOUTS
            core = EngineCore(scheduler, runner, channel, client, check, config.stamp_every, stage_timeout_s)
            client.send(info)
            client.start_heartbeat()
            stack.callback(client.stop_heartbeat)
            core.run()
        else:
            worker_channel = WorkerChannel(world, config.timeout_s)
            stack.callback(worker_channel.close)
            worker_loop(runner, worker_channel, world.rank == config.output_rank, check)


def worker_loop(runner: ModelRunner, channel: WorkerChannel, reports: bool, check: Callable[[], None]) -> None:
    """Compute rank 0's plans until it ends the engine.

    Enqueuing the next step on the device takes precedence over waiting for the output of an earlier one.
    """
    outstanding: deque[AsyncModelRunnerOutput] = deque()
    while True:
        while outstanding and (outstanding[0].ready or not channel.has_plan(_POLL_S)):
            if not outstanding[0].ready:
                continue
            output = outstanding.popleft().result()
            check()
            channel.send_output(output)
        if (plan := channel.recv_plan()) is None:
            return
        pending = runner.execute(plan)
        check()
        if reports and pending is not None:
            outstanding.append(pending)
