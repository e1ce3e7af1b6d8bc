"""How the tokens that the last stage draws come to the first one without the host: a step may be waiting for them.

After each step that draws, the last stage sends its table of tokens; the first takes it before the step that needs it,
and at the latest before one that is planned when the host knows the tokens. So no more messages wait in the mailbox
than steps may be under way, one more than there are stages. It must hold as many (:meth:`Parallel.comes_back`), as the
last stage must not wait for the first one, which may be waiting for it, or have nothing more to do.
"""

from __future__ import annotations

from collections import deque

import torch

from shotcast.engine.plan import PENDING, StepPlan
from shotcast.layers.parallel import Parallel


class Relay:
    """A rank's end of it; of a rank in a stage between, or of a model of one stage, nothing.

    Args:
        parallel: the ranks.
        drawn: int64 [slots + 1], of each slot the token drawn last; the last stage's, and here its copy.
    """

    def __init__(self, parallel: Parallel, drawn: torch.Tensor):
        self._parallel, self._drawn = parallel, drawn
        self._sends = parallel.stages > 1 and parallel.last
        self._takes = parallel.stages > 1 and parallel.first
        self._step = 0  # how many were begun: plans may be numbered anew
        self._drew: dict[int, int] = {}  # by slot, the last step that draws for it
        self._coming: deque[int] = deque()  # steps that draw, and whose tokens have not been taken

    def warm(self) -> None:
        """Pass the table on once, so that nothing is compiled later. Collective."""
        if self._sends:
            self._parallel.send_back(self._drawn)
        if self._takes:
            self._parallel.receive_back(self._drawn)

    def before(self, plan: StepPlan) -> None:
        """Take what there is to take before ``plan`` is computed."""
        if not self._takes:
            return
        number, self._step = self._step, self._step + 1
        pending = (sequence.slot for sequence in plan.sequences if sequence.tokens == (PENDING,))
        # As many steps as there are stages, and this one, may be without results when a step is planned.
        known = number - self._parallel.stages - 1
        until = max([known, *(self._drew[slot] for slot in pending)])
        while self._coming and self._coming[0] <= until:
            self._coming.popleft()
            self._parallel.receive_back(self._drawn)
        if plan.draws:
            self._coming.append(number)
        for sequence in plan.sequences:
            if sequence.draws:
                self._drew[sequence.slot] = number

    def after(self, plan: StepPlan) -> None:
        """Send on what ``plan`` drew."""
        if self._sends and plan.draws:
            self._parallel.send_back(self._drawn)
