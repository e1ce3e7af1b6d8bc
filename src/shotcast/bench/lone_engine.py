"""The engine's loop and scheduler on one rank, with requests that all arrive at once."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

from shotcast.engine.engine_core import EngineCore, Runner
from shotcast.engine.requests import Request
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.step_plan import StepPlan


class _LoneClient:
    """A client that sends its requests at once, then ends the engine."""

    def __init__(self, requests: list[Request]):
        self._messages: list[Request | None] = [*requests]

    def poll(self) -> bool:
        return bool(self._messages)

    def recv(self) -> Request | None:
        return self._messages.pop(0) if self._messages else None

    def send(self, message: Any) -> None:
        pickle.dumps(message)


class _NoRanks:
    """A stand-in for the channel to other ranks if there are none."""

    def send_plan(self, plan: StepPlan | None) -> None:
        """Send nothing."""

    def recv_output(self, timeout_s: float) -> Any:
        raise AssertionError("a rank alone has its output itself")


def serve(runner: Runner, config: SchedulerConfig, prompts: Sequence[int], output: int) -> None:
    """Serve requests with prompts of the given lengths in tokens; each ends by length."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    requests = [
        Request(f"{number}", tuple((number + place) % 1000 for place in range(length)), params)
        for number, length in enumerate(prompts)
    ]
    EngineCore(Scheduler(config), runner, _NoRanks(), _LoneClient(requests), lambda: None, 0, math.inf).run()
