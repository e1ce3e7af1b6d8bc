"""The worker loop: enqueuing the next step takes precedence over waiting for an output."""

from __future__ import annotations

from typing import Any

import pytest

from shotcast.engine.outputs import ModelRunnerOutput
from shotcast.engine.step_plan import StepPlan
from shotcast.engine.worker import worker_loop


class Scripted:
    """A model runner and a channel; the plans numbered ``waiting`` have arrived when the step before is computed."""

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
        output = ModelRunnerOutput(plan.number, (), ())

        class Pending:
            looks = 0

            @property
            def ready(pending) -> bool:  # noqa: N805
                pending.looks += 1
                return self._ready or pending.looks > 4

            result = staticmethod(lambda: self.log.append(f"wait {plan.number}") or output)

        return Pending()

    def send_output(self, output: ModelRunnerOutput) -> None:
        self.log.append(f"report {output.number}")


def logged(waiting: list[int], ready: bool) -> str:
    script = Scripted(waiting, ready)
    worker_loop(script, script, True, lambda: script.log.append("check"))  # type: ignore[arg-type]
    return ", ".join(script.log)


def test_a_waiting_plan_goes_before_waiting_for_the_device() -> None:
    log = logged([1, 2], ready=False)
    assert log.startswith(
        "take 0, check, take 1, check, take 2, check, wait 0, check, report 0, wait 1, check, report 1"
    )
    assert log.endswith("wait 2, check, report 2, take 3")


@pytest.mark.parametrize(("waiting", "ready"), [([], False), ([1, 2], True)])
def test_an_output_that_is_ready_or_the_only_work_is_sent_at_once(waiting: list[int], ready: bool) -> None:
    assert logged(waiting, ready).startswith("take 0, check, wait 0, check, report 0, take 1, check, wait 1, check")
