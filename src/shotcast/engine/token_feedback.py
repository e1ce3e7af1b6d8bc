"""Feedback of sampled tokens from the last pipeline stage to the first on the device, without the host.

So a step can be enqueued before the host knows the tokens that it starts from. After each step that samples, the last
stage sends its table of tokens. The first stage receives it before the first step that needs it, and no later than a
step planned after the host knew the tokens. So the mailbox never holds more messages than there can be outstanding
steps, which is one more than there are stages. The mailbox must have room for that many
(:meth:`Parallel.can_send_back`): the last stage must not wait for the first, which may be waiting for the last, or may
be idle.
"""

from __future__ import annotations

from collections import deque

import torch

from shotcast.engine.step_plan import PENDING_TOKEN, StepPlan
from shotcast.layers.parallel import Parallel


class TokenFeedback:
    """One rank's end of the feedback. Ranks of inner stages and of single-stage models do nothing.

    Args:
        last_tokens: int64 [slots + 1], the last sampled token of each slot: the table of the last stage, or its copy in
            the first stage.
    """

    def __init__(self, parallel: Parallel, last_tokens: torch.Tensor):
        self._parallel, self._last_tokens = parallel, last_tokens
        self._sends = parallel.stages > 1 and parallel.last
        self._receives = parallel.stages > 1 and parallel.first
        self._num_steps = 0  # steps begun so far; the numbers of plans may start again
        self._sampled_by: dict[int, int] = {}  # for each slot, the last step that samples for it
        self._outstanding: deque[int] = deque()  # steps whose sampled tokens have not been received

    def warm_up(self) -> None:
        """Send the table once, so that no kernel needs compiling later. Collective."""
        if self._sends:
            self._parallel.send_back(self._last_tokens)
        if self._receives:
            self._parallel.receive_back(self._last_tokens)

    def before_step(self, plan: StepPlan) -> None:
        """Receive the tables of earlier steps that must arrive before ``plan`` is computed."""
        if not self._receives:
            return
        number, self._num_steps = self._num_steps, self._num_steps + 1
        pending = (sequence.slot for sequence in plan.sequences if sequence.tokens == (PENDING_TOKEN,))
        # When a step is planned, the results of this step and of one step per stage may still be unknown.
        known = number - self._parallel.stages - 1
        last_needed = max([known, *(self._sampled_by[slot] for slot in pending)])
        while self._outstanding and self._outstanding[0] <= last_needed:
            self._outstanding.popleft()
            self._parallel.receive_back(self._last_tokens)
        if plan.do_sample:
            self._outstanding.append(number)
        for sequence in plan.sequences:
            if sequence.do_sample:
                self._sampled_by[sequence.slot] = number

    def after_step(self, plan: StepPlan) -> None:
        """Send the tokens that ``plan`` sampled."""
        if self._sends and plan.do_sample:
            self._parallel.send_back(self._last_tokens)
