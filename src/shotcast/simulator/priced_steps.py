"""Plans of the scheduler, priced: what joins the simulated engine to the model of a step."""

from __future__ import annotations

from shotcast.engine.step_plan import StepPlan
from shotcast.planner.step import StepModel, StepWork
from shotcast.simulator.serving import StepTimes

_CONTEXT_UNIT = 32
"""Contexts of sequences that decode are averaged and rounded to this many tokens, so that steps are priced once."""


def work_of(plan: StepPlan) -> StepWork:
    """Return the tokens of a plan."""
    decoding = [part.num_computed for part in plan.sequences if len(part.tokens) == 1]
    context = sum(decoding) / len(decoding) if decoding else 0.0
    return StepWork(
        decoding=len(decoding),
        context=round(context / _CONTEXT_UNIT) * _CONTEXT_UNIT,
        prompts=tuple((len(part.tokens), part.num_computed) for part in plan.sequences if len(part.tokens) > 1),
        sampled=sum(part.do_sample for part in plan.sequences),
    )


class PricedSteps:
    """Predicts the times of a plan by a model of the step."""

    def __init__(self, model: StepModel):
        self._model = model

    def __call__(self, plan: StepPlan) -> StepTimes:
        work = work_of(plan)
        stages = self._model.stages(work)
        return StepTimes(
            [stage.time_us / 1e6 for stage in stages],
            [transfer / 1e6 for transfer in self._model.transfers_us(work)],
            self._model.host_us(work) / 1e6,
            not self._model.hides_host,
            [stage.saved_us / 1e6 for stage in stages],
        )
