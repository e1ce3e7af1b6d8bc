"""Tokens that go from the last stage to the first: what is taken when, and that stages never wait for each other."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shotcast.engine.requests import Request
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.step_plan import PENDING_TOKEN, StepPlan
from shotcast.engine.token_feedback import TokenFeedback
from shotcast.layers.parallel import Parallel

SLOTS = 6


def planned(stages: int, seed: int, requests: int) -> list[StepPlan]:
    """What a scheduler asks a pipeline for, with as many steps outstanding as it likes, down to few."""
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
        scheduler.update(plan.number, [draw.randrange(9) for sequence in plan.sequences if sequence.do_sample])
    return plans


class Stage:
    """What a rank enqueues, in order: (what, its channel or step)."""

    def __init__(self, stage: int, stages: int):
        self.stages, self.first, self.last = stages, stage == 0, stage == stages - 1
        self.stage = stage
        self.queue: deque[tuple[str, Any]] = deque()
        self.feedback = TokenFeedback(self, torch.zeros(SLOTS + 1, dtype=torch.int64))  # type: ignore[arg-type]

    def send_back(self, drawn: torch.Tensor) -> None:
        self.queue.append(("send", "tokens"))

    def receive_back(self, drawn: torch.Tensor) -> None:
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
    """Let all stages go on as far as they can; the steps that the first one could compute.

    What each does next depends on messages alone, so whether they come to an end depends on no order of theirs.

    Args:
        mailbox, between: messages that wait, of tokens and of what goes from stage to stage.
    """
    channels: dict[Any, deque[int]] = {name: deque() for name in ("tokens", *range(len(stages)))}
    room = {name: mailbox if name == "tokens" else between for name in channels}
    drew = dict.fromkeys(range(SLOTS), -1)  # by slot, the last step of the last stage that drew
    table = dict(drew)  # the same, as the first one knows it
    sent: deque[dict[int, int]] = deque()
    wanted = dict(drew)  # the last step of the first stage that draws
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
                            (drew if stage.last else {})[sequence.slot] = which.number
                            (wanted if stage.first else {})[sequence.slot] = which.number
                    if stage.first:
                        computed.append(which)
                elif what == "send":
                    if len(channels[which]) >= room[which]:
                        break
                    channels[which].append(0)
                    if which == "tokens":
                        sent.append(dict(drew))
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
def test_every_step_has_its_tokens_and_no_stage_waits_for_ever(
    stages: int, seed: int, requests: int, between: int
) -> None:
    plans = planned(stages, seed, requests)
    ranks = enqueued(stages, plans)
    assert run(ranks, stages + 1, between) == plans
    assert all(not rank.queue for rank in ranks[1:])


def test_without_a_mailbox_stages_wait_for_each_other() -> None:
    """The last stage cannot give its tokens before the first one takes them."""
    plans = planned(2, 3, 8)
    assert any(sequence.tokens == (PENDING_TOKEN,) for plan in plans for sequence in plan.sequences)
    assert run(enqueued(2, plans), 3, 1) == plans
    assert run(enqueued(2, plans), 0, 1) != plans


def test_what_nobody_needs_any_more_waits_in_the_mailbox() -> None:
    """As many messages as may be planned ahead, of the last steps of all. The last stage must not wait with them."""
    plans = planned(2, 0, 2)
    ranks = enqueued(2, plans)
    assert run(ranks, 2, 1) == plans
    assert [what for what, _ in ranks[-1].queue] == ["send"]


def test_a_step_waits_for_what_it_needs_alone() -> None:
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
    # Step 3 needs what step 0 drew, step 4 what 2 drew. Step 5 needs nothing, step 6 what 5 drew, and takes all.
    assert taken == [6, 1, 2, 0, 3]


@pytest.mark.parametrize(("stages", "room", "ahead"), [(1, 0, True), (2, 0, False), (2, 2, False), (2, 3, True)])
def test_a_mailbox_must_hold_a_message_more_than_there_are_stages(stages: int, room: int, ahead: bool) -> None:
    comm: Any = SimpleNamespace(rank=0, world_size=1)
    job: Any = SimpleNamespace(rank=0, waiting_messages=lambda x: room)
    assert Parallel(comm, job, stages).can_send_back(torch.zeros(3)) == ahead


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_between_pass_nothing_on(stage: int) -> None:
    rank = Stage(stage, 3)
    rank.feedback.warm_up()
    assert [entry[0] for entry in rank.queue] == [["receive"], [], ["send"]][stage]
