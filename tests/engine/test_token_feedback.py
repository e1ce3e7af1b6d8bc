"""Feedback of tokens from the last stage to the first: when they are received, and that no deadlock occurs."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shotcast.engine.outputs import ModelRunnerOutput
from shotcast.engine.requests import Request
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.step_plan import PENDING_TOKEN, StepPlan
from shotcast.engine.token_feedback import TokenFeedback
from shotcast.layers.parallel import Parallel

SLOTS = 6


def planned(stages: int, seed: int, requests: int) -> list[StepPlan]:
    """Return the plans of a scheduler for a pipeline, with varying numbers of outstanding steps."""
    draw = random.Random(seed)
    config = SchedulerConfig(SLOTS, 12, 4, 40, 40, lookahead=1, pipeline=stages, eos=(0,))
    scheduler, plans, outstanding = Scheduler(config), [], deque[StepPlan]()
    for number in range(requests):
        prompt = tuple(draw.randrange(1, 9) for _ in range(draw.randint(1, 20)))
        scheduler.add(Request(f"{number}", prompt, SamplingParams(max_tokens=draw.randint(1, 12))))
    while scheduler.unfinished or outstanding:
        wanted = draw.randint(1, stages + 1)
        while len(outstanding) < wanted and (plan := scheduler.schedule()) is not None:
            plans.append(plan)
            outstanding.append(plan)
        plan = outstanding.popleft()
        tokens = tuple(draw.randrange(9) for sequence in plan.sequences if sequence.do_sample)
        scheduler.update(ModelRunnerOutput(plan.number, tokens, (None,) * len(tokens)))
    return plans


class Stage:
    """A rank's queue of operations, in order: (operation, its channel or step)."""

    def __init__(self, stage: int, stages: int):
        self.stages, self.first, self.last = stages, stage == 0, stage == stages - 1
        self.stage = stage
        self.queue: deque[tuple[str, Any]] = deque()
        self.feedback = TokenFeedback(self, torch.zeros(SLOTS + 1, dtype=torch.int64))  # type: ignore[arg-type]

    def send_back(self, last_tokens: torch.Tensor) -> None:
        self.queue.append(("send", "tokens"))

    def receive_back(self, last_tokens: torch.Tensor) -> None:
        self.queue.append(("receive", "tokens"))

    def execute(self, plan: StepPlan) -> None:
        self.feedback.before_step(plan)
        if not self.first:
            self.queue.append(("receive", self.stage - 1))
        self.queue.append(("compute", plan))
        if not self.last:
            self.queue.append(("send", self.stage))
        self.feedback.after_step(plan)


def run(stages: list[Stage], mailbox: int, between: int) -> list[StepPlan]:
    """Run all stages as far as they can, and return the steps that the first stage could compute.

    Each operation depends on messages only, so whether the stages finish does not depend on the order of simulation.

    Args:
        mailbox, between: capacity of the channels, in messages: of tokens, and of activations between stages.
    """
    channels: dict[Any, deque[int]] = {name: deque() for name in ("tokens", *range(len(stages)))}
    room = {name: mailbox if name == "tokens" else between for name in channels}
    sampled = dict.fromkeys(range(SLOTS), -1)  # by slot, the last step in which the last stage sampled
    table = dict(sampled)  # the same, as the first stage knows it
    sent: deque[dict[int, int]] = deque()
    wanted = dict(sampled)  # by slot, the last step of the first stage that samples
    computed = []
    moving = True
    while moving:
        moving = False
        for stage in stages:
            while stage.queue:
                what, which = stage.queue[0]
                if what == "compute":
                    for sequence in which.sequences if stage.first else ():
                        if sequence.tokens == (PENDING_TOKEN,):
                            assert table[sequence.slot] == wanted[sequence.slot], "an old token is computed"
                    for sequence in which.sequences:
                        if sequence.do_sample:
                            (sampled if stage.last else {})[sequence.slot] = which.number
                            (wanted if stage.first else {})[sequence.slot] = which.number
                    if stage.first:
                        computed.append(which)
                elif what == "send":
                    if len(channels[which]) >= room[which]:
                        break
                    channels[which].append(0)
                    if which == "tokens":
                        sent.append(dict(sampled))
                else:
                    if not channels[which]:
                        break
                    channels[which].popleft()
                    if which == "tokens":
                        table = sent.popleft()
                stage.queue.popleft()
                moving = True
    return computed


def enqueued(stages: int, plans: list[StepPlan]) -> list[Stage]:
    ranks = [Stage(number, stages) for number in range(stages)]
    for plan in plans:
        for rank in ranks:
            rank.execute(plan)
    return ranks


@given(st.integers(2, 5), st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 3))
def test_every_step_has_its_tokens_and_no_stage_waits_forever(
    stages: int, seed: int, requests: int, between: int
) -> None:
    plans = planned(stages, seed, requests)
    ranks = enqueued(stages, plans)
    assert run(ranks, stages + 1, between) == plans
    assert all(not rank.queue for rank in ranks[1:])


def test_without_a_mailbox_stages_deadlock() -> None:
    """The last stage cannot send its tokens before the first one receives them."""
    plans = planned(2, 3, 8)
    assert any(sequence.tokens == (PENDING_TOKEN,) for plan in plans for sequence in plan.sequences)
    assert run(enqueued(2, plans), 3, 1) == plans
    assert run(enqueued(2, plans), 0, 1) != plans


def test_tokens_that_no_step_needs_stay_in_the_mailbox() -> None:
    """The last steps leave as many messages as may be planned ahead, and the last stage must not wait for them."""
    plans = planned(2, 0, 2)
    ranks = enqueued(2, plans)
    assert run(ranks, 2, 1) == plans
    assert [what for what, _ in ranks[-1].queue] == ["send"]


def test_a_step_waits_only_for_the_tokens_that_it_needs() -> None:
    def step(number: int, slot: int, token: int) -> StepPlan:
        sequence = SimpleNamespace(slot=slot, tokens=(token,), do_sample=True)
        return StepPlan(number, (sequence,))  # type: ignore[arg-type]

    first = Stage(0, 3)
    for number, (slot, token) in enumerate([(0, 5), (1, 5), (2, 5)]):
        first.execute(step(number, slot, token))
    taken = [len(first.queue)]
    for number, (slot, token) in enumerate([(0, PENDING_TOKEN), (2, PENDING_TOKEN), (3, 5), (3, PENDING_TOKEN)], 3):
        first.queue.clear()
        first.execute(step(number, slot, token))
        taken.append([what for what, _ in first.queue].count("receive"))
    # Step 3 needs the tokens of step 0, and step 4 those of 2. Step 5 needs none, and step 6 needs those of 5.
    assert taken == [6, 1, 2, 0, 3]


@pytest.mark.parametrize(("stages", "room", "ahead"), [(1, 0, True), (2, 0, False), (2, 2, False), (2, 3, True)])
def test_a_mailbox_must_hold_a_message_more_than_there_are_stages(stages: int, room: int, ahead: bool) -> None:
    comm: Any = SimpleNamespace(rank=0, world_size=1)
    world: Any = SimpleNamespace(rank=0, waiting_messages=lambda x: room)
    assert Parallel(comm, world, stages).can_send_back(torch.zeros(3)) == ahead


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_inner_stages_do_nothing(stage: int) -> None:
    rank = Stage(stage, 3)
    rank.feedback.warm_up()
    assert [entry[0] for entry in rank.queue] == [["receive"], [], ["send"]][stage]
