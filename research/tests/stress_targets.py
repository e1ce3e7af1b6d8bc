"""Functions that the ranks of tests/bench/test_stress.py run."""

from __future__ import annotations

import stress_calls
import torch

import shotcast


class _Misled(stress_calls.Stress):
    def _broadcast(self, case: stress_calls.Case) -> torch.Tensor:
        return super()._broadcast(case) + 1


class _Failing(stress_calls.Stress):
    def _broadcast(self, case: stress_calls.Case) -> torch.Tensor:
        raise ZeroDivisionError(f"call {case.number}")


def misled(plan: stress_calls.Plan) -> None:
    """Make a run that takes broadcasts for wrong."""
    stress_calls.run(plan, _Misled)


def late_on_one_rank(plan: stress_calls.Plan) -> tuple[bool, bool]:
    """Return whether a run is late, before and after rank 0 alone has taken its time."""
    with shotcast.Communicator(device=plan.device, timeout_s=plan.timeout_s) as comm:
        stress = stress_calls.Stress(plan, comm)
        before = stress.late()
        stress.began -= plan.seconds * (comm.rank == 0)
        after = stress.late()
        stress.close()
    return before, after


def failing(plan: stress_calls.Plan) -> None:
    """Make a run in which a broadcast fails."""
    stress_calls.run(plan, _Failing)
