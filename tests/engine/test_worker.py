"""What a rank that is not rank 0 does first: give its device work, or wait for what that has done."""

from __future__ import annotations

from typing import Any

import pytest

from shotcast.engine.model_runner import ModelRunnerOutput
from shotcast.engine.step_plan import StepPlan
from shotcast.engine.worker import worker_loop


class Scripted:
    """ModelRunner, follower and drawings at once; ``waiting`` plans are there when each step is taken."""

    def __init__(self, waiting: list[int], ready: bool):
        self.log: list[str] = []
        self._waiting, self._ready, self._number = waiting, ready, 0

    def has_plan(self, timeout_s: float) -> bool:
        assert 0 < timeout_s < 0.01
        return bool(self._waiting) and self._number in self._waiting

    def recv_plan(self) -> StepPlan | None:
        self.log.append(f"take {self._number}")
        self._number += 1
        return StepPlan(self._number - 1, ()) if self._number < 4 else None

    def execute(self, plan: StepPlan) -> Any:
        drawn = ModelRunnerOutput(plan.number, (), ())

        class AsyncModelRunnerOutput:
            looks = 0

            @property
            def ready(drawing) -> bool:  # noqa: N805
                drawing.looks += 1
                return self._ready or drawing.looks > 4

            result = staticmethod(lambda: self.log.append(f"wait {plan.number}") or drawn)

        return AsyncModelRunnerOutput()

    def send_output(self, output: ModelRunnerOutput) -> None:
        self.log.append(f"report {output.number}")


def followed(waiting: list[int], ready: bool) -> str:
    script = Scripted(waiting, ready)
    worker_loop(script, script, True, lambda: script.log.append("check"))  # type: ignore[arg-type]
    return ", ".join(script.log)


def test_a_plan_that_waits_goes_before_waiting_for_the_device() -> None:
    told = followed([1, 2], ready=False)
    assert told.startswith(
        "take 0, check, take 1, check, take 2, check, wait 0, check, report 0, wait 1, check, report 1"
    )
    assert told.endswith("wait 2, check, report 2, take 3")


@pytest.mark.parametrize(("waiting", "ready"), [([], False), ([1, 2], True)])
def test_what_is_ready_or_all_there_is_is_reported_at_once(waiting: list[int], ready: bool) -> None:
    assert followed(waiting, ready).startswith("take 0, check, wait 0, check, report 0, take 1, check, wait 1, check")
