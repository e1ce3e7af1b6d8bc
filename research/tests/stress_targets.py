"""Functions that the ranks of tests/bench/test_stress.py run."""

from __future__ import annotations

import stress_calls
import torch


class _Misled(stress_calls.Stress):
    def _broadcast(self, case: stress_calls.Case) -> torch.Tensor:
        return super()._broadcast(case) + 1


class _Failing(stress_calls.Stress):
    def _broadcast(self, case: stress_calls.Case) -> torch.Tensor:
        raise ZeroDivisionError(f"call {case.number}")


def misled(plan: stress_calls.Plan) -> None:
    """Make a run that takes broadcasts for wrong."""
    stress_calls.run(plan, _Misled)


def failing(plan: stress_calls.Plan) -> None:
    """Make a run in which a broadcast fails."""
    stress_calls.run(plan, _Failing)
