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


def turning(plan: stress_calls.Plan) -> int:
    """Make calls that send FP8 before and after the inputs change. Return how many were wrong."""
    with shotcast.Communicator(device=plan.device, timeout_s=plan.timeout_s) as comm:
        stress = stress_calls.Stress(plan, comm)
        sums = [case for case in map(stress.case, range(40)) if case.kind == "all_reduce"]
        cases = [case._replace(algorithm="two_shot_fp8") for case in sums[:4]]
        for _ in range(2):
            for case in cases:
                stress.run(case)
            stress.turn()
        wrong = len(stress.wrong())
        stress.close()
    assert cases
    return wrong


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
