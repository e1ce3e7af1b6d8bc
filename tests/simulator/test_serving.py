"""The simulated engine: what it does with constant steps can be said without it, and what it must always keep."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.step_plan import StepPlan
from shotcast.errors import ConfigError
from shotcast.simulator.serving import Arrival, StepTimes, serve


def config(stages: int = 1, **options: int) -> SchedulerConfig:
    limits = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "num_blocks": 4096,
        "max_model_len": 512,
    }
    return SchedulerConfig(**(limits | options), prefix_caching=False, lookahead=1, pipeline=stages)  # type: ignore[arg-type]


def constant(*stages_s: float, transfer_s: float = 0.0, host_s: float = 0.0, in_loop: bool = False) -> Timer:
    return Timer(StepTimes(stages_s, [transfer_s] * len(stages_s), host_s, in_loop))


def on_cpu(stages: int = 1, **options: int) -> SchedulerConfig:
    return replace(config(stages, **options), lookahead=0)


class Timer:
    """Every step takes as long; it remembers the steps."""

    def __init__(self, times: StepTimes):
        self.times = times
        self.plans: list[StepPlan] = []

    def __call__(self, plan: StepPlan) -> StepTimes:
        self.plans.append(plan)
        return self.times


def test_one_request_takes_a_step_a_token() -> None:
    service = serve([Arrival(3.0, 100, 10)], config(), constant(2.0))
    (request,) = service.requests
    assert request.times_s == [3.0 + 2.0 * step for step in range(1, 11)]
    assert (request.ttft_s, request.tpot_s) == (2.0, 2.0)
    assert service.tokens_per_s == pytest.approx(0.5)
    assert service.seconds == 20.0
    assert service.busy_s == (20.0,)


def test_a_prompt_in_chunks() -> None:
    """256 tokens a step: three steps before the first token."""
    (request,) = serve([Arrival(0.0, 500, 2)], config(max_num_batched_tokens=200), constant(1.0)).requests
    assert request.times_s == [3.0, 4.0]


def test_a_token_passes_all_stages() -> None:
    """Stages of 1, 2 and 3 seconds, 0.5 to the next and back to the first: 7.5 seconds a token of one request."""
    (request,) = serve([Arrival(0.0, 10, 4)], config(3), constant(1.0, 2.0, 3.0, transfer_s=0.5)).requests
    assert request.times_s == [7.5, 15.0, 22.5, 30.0]


def test_a_full_pipeline_takes_the_time_of_its_slowest_stage() -> None:
    """Three requests keep three stages busy: a token of one of them each 3 seconds, once they have all begun."""
    timer = constant(1.0, 2.0, 3.0)
    service = serve([Arrival(0.0, 200, 40)] * 3, config(3), timer)
    last = sorted(time for request in service.requests for time in request.times_s)[30:90]
    gaps = [after - before for before, after in itertools.pairwise(last)]
    assert sum(gaps) / len(gaps) == pytest.approx(3.0, rel=0.05)
    assert service.busy_s[2] / service.seconds > 0.9


def test_the_host_of_a_gpu_is_hidden_while_it_is_faster() -> None:
    """Steps are enqueued ahead, so only the first one waits for the host; a slower host is what a step takes."""
    (request,) = serve([Arrival(0.0, 10, 5)], config(), constant(2.0, host_s=0.5)).requests
    assert request.times_s == [2.5, 4.5, 6.5, 8.5, 10.5]
    (request,) = serve([Arrival(0.0, 10, 40)], config(), constant(2.0, host_s=3.0)).requests
    assert request.tpot_s == pytest.approx(3.0, rel=0.02)


def test_the_host_of_a_cpu_is_not_hidden() -> None:
    (request,) = serve([Arrival(0.0, 10, 5)], on_cpu(), constant(2.0, host_s=0.5, in_loop=True)).requests
    assert request.times_s == [2.5, 5.0, 7.5, 10.0, 12.5]


def test_a_cpu_rank_notices_requests_between_steps() -> None:
    """The second request comes in the middle of the third step, and shares the fourth."""
    arrivals = [Arrival(0.0, 10, 6), Arrival(5.0, 10, 2)]
    first, second = serve(arrivals, on_cpu(), constant(2.0, in_loop=True)).requests
    assert first.times_s == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert second.times_s == [8.0, 10.0]


def test_the_first_stage_of_a_cpu_holds_up_its_loop() -> None:
    """Rank 0 computes 4 seconds of two plans before it looks at what the second stage made after 3."""
    arrivals = [Arrival(0.0, 200, 2), Arrival(0.0, 200, 2)]
    ahead = serve(arrivals, on_cpu(2), constant(2.0, 1.0))
    in_loop = serve(arrivals, on_cpu(2), constant(2.0, 1.0, in_loop=True))
    assert [request.times_s[0] for request in ahead.requests] == [3.0, 5.0]
    assert [request.times_s[0] for request in in_loop.requests] == [4.0, 6.0]


def test_requests_that_wait_for_nothing_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "schedule", lambda self: None)
    with pytest.raises(ConfigError, match="room in the cache that nothing will free"):
        serve([Arrival(0.0, 10, 5), Arrival(1.0, 10, 5)], config(), constant(1.0))


def test_requests_that_arrive_later_join() -> None:
    service = serve([Arrival(5.5, 10, 3), Arrival(0.0, 10, 10)], config(), constant(1.0))
    late, early = service.requests
    # one more step is enqueued than is being computed
    assert late.times_s[0] in (8.0, 9.0)
    assert early.times_s[:3] == [1.0, 2.0, 3.0]


def test_a_small_cache_preempts() -> None:
    service = serve([Arrival(0.0, 60, 100)] * 4, config(num_blocks=24), constant(1.0))
    assert service.preemptions > 0
    assert all(len(request.times_s) == 100 for request in service.requests)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="no request to serve"):
        serve([], config(), constant(1.0))
    with pytest.raises(ConfigError, match="take 32 blocks of 16 tokens, and the cache has 4"):
        serve([Arrival(0.0, 500, 12)], config(num_blocks=4), constant(1.0))


arrivals = st.lists(
    st.builds(Arrival, st.floats(0, 50), st.integers(1, 400), st.integers(1, 40)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals,
    st.integers(1, 4),
    st.integers(32, 512),
    st.integers(1, 8),
    st.floats(0.01, 5),
    st.floats(0, 1),
    st.booleans(),
)
@example([Arrival(0.0, 1, 2)] * 2, 2, 32, 2, 0.5, 1.0, False)
def test_what_always_holds(
    requests: list[Arrival], stages: int, blocks: int, sequences: int, step_s: float, host_s: float, cpu: bool
) -> None:
    timer = constant(*[step_s] * stages, transfer_s=0.1, host_s=host_s, in_loop=cpu)
    limits = (on_cpu if cpu else config)(stages, num_blocks=blocks, max_num_seqs=sequences)
    service = serve(requests, limits, timer)
    assert service.steps == len(timer.plans)
    latency_s = stages * step_s + (stages - 1) * 0.1
    for arrival, request in zip(requests, service.requests, strict=True):
        assert len(request.times_s) == arrival.output
        # each token needs the one before it; the loop may be late to see one, and then sees the next one sooner
        for tokens, seen_s in enumerate(request.times_s, 1):
            assert seen_s - arrival.time_s >= tokens * latency_s * (1 - 1e-9)
    assert all(busy == pytest.approx(service.steps * step_s) for busy in service.busy_s)
    assert max(service.busy_s) <= service.seconds * (1 + 1e-9)
    tokens = sum(len(each.tokens) for plan in timer.plans for each in plan.sequences)
    assert tokens >= sum(one.prompt + one.output - 1 for one in requests)
    if not service.preemptions:
        assert tokens == sum(one.prompt + one.output - 1 for one in requests)
    # a step gives each sequence one token at most, and takes the slowest of host and stage
    most = min(sequences, len(requests)) / max(step_s, host_s)
    assert service.tokens_per_s <= most * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(arrivals, st.integers(1, 8), st.floats(0.01, 5), st.floats(0, 1))
def test_a_cpu_computes_while_there_is_a_request(
    requests: list[Arrival], sequences: int, step_s: float, host_s: float
) -> None:
    """One rank is idle from when all requests that have come are served until the next one comes, and never else."""
    service = serve(requests, on_cpu(max_num_seqs=sequences), constant(step_s, host_s=host_s, in_loop=True))
    idle_s, served_s = 0.0, 0.0
    for arrival_s, last_s in sorted((request.arrival_s, request.times_s[-1]) for request in service.requests):
        idle_s += max(0.0, arrival_s - served_s) if served_s else 0.0
        served_s = max(served_s, last_s)
    assert service.seconds == pytest.approx(service.steps * (step_s + host_s) + idle_s)


def test_all_at_once_is_the_most_that_arrivals_get() -> None:
    """Requests that come one by one, however fast, are not served faster than those that are all there."""
    numbers = random.Random(0)
    lengths = [(numbers.randint(5, 100), numbers.randint(5, 40)) for _ in range(80)]
    limits = on_cpu(max_num_seqs=16)
    capacity = serve([Arrival(0.0, *each) for each in lengths], limits, constant(1.0, in_loop=True)).tokens_per_s
    for rate in (0.2, 0.5, 1.0, 5.0):
        gaps = [numbers.expovariate(rate) for _ in lengths]
        times = itertools.accumulate(gaps)
        timer = constant(1.0, in_loop=True)
        service = serve([Arrival(time_s, *each) for time_s, each in zip(times, lengths, strict=True)], limits, timer)
        assert service.tokens_per_s <= capacity * 1.01
