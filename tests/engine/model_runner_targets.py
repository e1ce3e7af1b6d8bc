"""Functions that ranks run for test_model_runner.py: scheduler and model runner without the engine's processes."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import shotcast
from shotcast.engine import prefill_forms
from shotcast.engine.cuda_graphs import decode_capture_size, decode_capture_sizes
from shotcast.engine.draft_model import DraftModel
from shotcast.engine.grammar import Vocabulary
from shotcast.engine.model_runner import AsyncModelRunnerOutput, ModelRunner, ModelRunnerOutput
from shotcast.engine.outputs import EngineCoreOutput
from shotcast.engine.prefill import PrefillGraphs
from shotcast.engine.requests import Request
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.sequence import SequenceState
from shotcast.engine.speculation import RankProposer, Speculation
from shotcast.engine.step_plan import PENDING_TOKEN, StepPlan
from shotcast.layers.parallel import Parallel
from shotcast.layers.step_timer import DeviceStepTimer, HostStepTimer, StepTimer
from shotcast.layers.weights import Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.source import open_checkpoint
from shotcast.overlap.policy import PLAIN, Decision

BLOCK = 4
LIMIT = 64
TOKENS = 24
"""Tokens of a step at most."""
MEASURED = 8
"""Tokens of a step on dynamic memory that is measured in halves. Steps of half as many tokens are divided too."""


def outputs_of(
    folder: str,
    requests: list[Request],
    sequences: int,
    blocks: int,
    static: tuple[int, ...],
    lookahead: int,
    stages: int = 1,
    device: str = "cpu",
    overlap: str = "off",
    vocabulary: Vocabulary | None = None,
    proposer: dict[str, list[int]] | str | None = None,
) -> tuple[dict[str, list[EngineCoreOutput]], dict[str, int]]:
    """Return the step outputs of each request, and the number of steps of each kind.

    Every rank schedules for itself; ranks of other stages than the last receive the sampled tokens.

    Args:
        static: numbers of tokens for which steps with prompts run on static memory; then all other steps do too. Empty:
            no step does.
        overlap: as for the model runner, or the name of a way, which serves all steps of 4 tokens or more.
        vocabulary: the tokens, for requests with grammars.
        proposer: the outputs, from which proposals are made, right or wrong by chance; or the folder of a draft model.
    """
    prefill_forms.LEAST_TOKENS.update({True: 4, False: 4})
    checkpoint = open_checkpoint(folder)
    with contextlib.ExitStack() as stack:
        world = comm = stack.enter_context(shotcast.Communicator(device=device))
        if stages > 1:
            comm = stack.enter_context(world.split(world.rank // (world.world_size // stages)))
        weights = Weights(checkpoint, torch.float32, comm.device)
        timer: StepTimer = DeviceStepTimer(comm.device) if device == "cuda" else HostStepTimer()
        model = CausalLM(checkpoint.config, weights, Parallel(comm, world, stages, timer=timer), LIMIT, sequences)
        sizes = decode_capture_sizes(sequences) if static else ()
        limits = blocks, BLOCK, sequences, LIMIT, 11, sizes, static
        proposals = 0 if proposer is None else 3 * sequences
        draft = None
        if isinstance(proposer, str) and model.parallel.last:
            drafting = open_checkpoint(proposer)
            weights = Weights(drafting, torch.float32, comm.device)
            smaller = CausalLM(drafting.config, weights, Parallel(comm, timer=timer), LIMIT, sequences)
            draft = DraftModel(ModelRunner(smaller, *limits), checkpoint.config.vocab)
        decisions = {}
        if overlap in (PLAIN, prefill_forms.BY_COPIES):
            numbers = static or (MEASURED,)
            decisions = {number: Decision(overlap, "chosen by a test", {}, {}) for number in numbers}
            overlap = "auto"
        runner = ModelRunner(
            model,
            *limits,
            overlap=overlap,
            max_num_batched_tokens=MEASURED,
            decisions=decisions,
            max_proposals=proposals,
            draft=draft,
        )
        assert runner.lookahead >= lookahead
        assert runner.execute(StepPlan(-1, (), prepares=vocabulary)) is None
        eos = checkpoint.config.eos

        def scheduler() -> Scheduler:
            if proposer is None:
                return Scheduler(config)
            guesses = Oracle(proposer, 24, 8) if isinstance(proposer, dict) else Oracle({}, 24, 4)
            source = guesses if isinstance(proposer, dict) else RankProposer()
            return Scheduler(config, Speculation(3, proposals, source, guesses))

        config = SchedulerConfig(sequences, TOKENS, BLOCK, blocks, LIMIT, lookahead=lookahead, pipeline=stages, eos=eos)
        with (
            counted(CausalLM, "hidden_of_parts") as divided,
            counted(ModelRunner, "_eager_batch") as eager,
            counted(PrefillGraphs, "_compute_head") as heads,
        ):
            runner.capture(stamped=False)
            heads.reset_mock()
            divided.reset_mock()
            measured = sum(len(decision.median_us) for decision in runner.overlap.values())
            found, counts = run_requests(runner, scheduler(), requests, sizes, static, world, False)
            counts |= {"eager": eager.call_count, "heads": heads.call_count}
            counts |= {"divided": divided.call_count, "measured": measured}
        if device == "cuda" or stages > 1:  # everything is compiled by now
            again, _ = run_requests(runner, scheduler(), requests, sizes, static, world, device == "cuda")
            assert again == found, "another run gives something else"
        runner.close()
    return found, counts


class Oracle:
    """Proposes the tokens of outputs that are known, some of them wrong.

    Of each ``every`` steps, the first ``without`` have no proposals. A draft model then has to catch up.
    """

    def __init__(self, outputs: dict[str, list[int]], every: int, without: int):
        self._outputs, self._every, self._without, self._steps = outputs, every, without, 0
        self._draw = random.Random(3)

    def speculates(self, running: int) -> bool:
        self._steps += 1
        return self._steps % self._every >= self._without

    def record(self, running: int, speculated: bool, tokens: float, seconds: float) -> None:
        """Learn nothing."""

    def propose(self, sequence: SequenceState, count: int) -> list[int]:
        known = self._outputs[sequence.request_id]
        place = len(sequence.tokens) - sequence.prompt_length
        right = known[place : place + self._draw.randrange(count + 1)]
        return [token if self._draw.random() < 0.8 else (token + 1) % 200 for token in right]


def counted(owner: type, name: str) -> Any:
    """Count the calls of a method, which still does its work."""
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def output_of_last_rank(pending: AsyncModelRunnerOutput | None, comm: shotcast.Communicator) -> ModelRunnerOutput:
    """Return the output of the last rank, which must equal those of all ranks of its stage."""
    outputs = [None if pending is None else pending.result()]
    if comm.world_size > 1:
        dist.broadcast_object_list(outputs, comm.world_size - 1, device=torch.device("cpu"))
    assert outputs[0] is not None
    assert pending is None or pending.result() == outputs[0]
    return outputs[0]


def run_requests(
    runner: ModelRunner,
    scheduler: Scheduler,
    requests: list[Request],
    sizes: tuple[int, ...],
    prompt_sizes: tuple[int, ...],
    comm: shotcast.Communicator,
    strict: bool,
) -> tuple[dict[str, list[EngineCoreOutput]], dict[str, int]]:
    """Run all requests to their end, and count steps by kind.

    The counts are, of steps that only decode on static memory: all, those with padding, and those planned ahead. Of
    other steps: all, those with padding, with decoding sequences, with sequences that wait for their token, without any
    sampling, and with chunks that are not the first of their prompt.

    Args:
        strict: on CUDA, fail if enqueuing a step waits for the device.
    """
    kinds = "static", "padded", "pending", "prompts", "padded prompts", "mixed", "pending mixed", "silent", "later"
    counts = dict.fromkeys(kinds, 0)
    found: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    waiting, outstanding = deque(requests), deque[AsyncModelRunnerOutput | None]()
    while waiting or outstanding or scheduler.unfinished:
        for _ in range(2):
            if waiting:
                scheduler.add(waiting.popleft())
        while (plan := scheduler.schedule()) is not None:
            size = decode_capture_size(plan, sizes)
            counts["static"] += size is not None
            counts["padded"] += size is not None and size > len(plan.sequences)
            pending = any(sequence.tokens == (PENDING_TOKEN,) for sequence in plan.sequences)
            counts["pending"] += pending
            if size is None:
                counts["prompts"] += 1
                tokens = sum(len(sequence.tokens) for sequence in plan.sequences)
                counts["padded prompts"] += tokens <= max(prompt_sizes, default=0) and tokens not in prompt_sizes
                mixed = any(not sequence.is_new for sequence in plan.sequences if len(sequence.tokens) == 1)
                counts["mixed"] += mixed
                counts["pending mixed"] += pending
                counts["silent"] += not any(sequence.do_sample for sequence in plan.sequences)
                counts["later"] += any(sequence.num_computed for sequence in plan.sequences if len(sequence.tokens) > 1)
            if strict:
                torch.cuda.set_sync_debug_mode("error")
            try:
                async_output = runner.execute(plan)
            finally:
                if strict:
                    torch.cuda.set_sync_debug_mode("default")
            outstanding.append(async_output)
        output = output_of_last_rank(outstanding.popleft(), comm)
        comm.check()
        for step_output in scheduler.update(output):
            found[step_output.request_id].append(step_output)
    stats = scheduler.stats()
    counts |= {"preemptions": stats.preemptions, "proposed": stats.proposed_tokens, "accepted": stats.accepted_tokens}
    return found, counts
