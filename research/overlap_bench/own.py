"""Our forms: messages by our kernels, under products of the vendor's library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matmuls import LibraryProduct, Product

from overlap_bench.config import COMMUNICATION, COMPUTE
from overlap_bench.form import Candidate, Candidates, Form
from overlap_bench.steps import Steps, library_product
from overlap_bench.timeline import timed, timed_chain
from shotcast.collectives.communicator import Communicator
from shotcast.overlap import schedule
from shotcast.overlap.chains import Chain, way_on
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import HIGH, LOW, StreamLanes, lanes_of
from shotcast.overlap.schedule import Communicate, Compute, Schedule

Message = Callable[[Communicator, int], Any]


def alone(steps: Steps) -> Candidates:
    """Yield the products alone and our messages alone."""

    def communicate_all() -> None:
        for number in range(steps.config.steps):
            steps.communicate(steps.comm, number)

    yield Candidate(COMPUTE, lambda: Form(steps.multiply_all, steps, whole=False), own=True)
    yield Candidate(COMMUNICATION, lambda: Form(communicate_all, steps, whole=False), own=True)


def chain_of(steps: Steps, communicators: list[Communicator]) -> Chain:
    """Return the chain that a user would make of the steps."""

    def computation(number: int) -> Callable[[], int]:
        def compute() -> int:
            steps.multiply(number)
            return number

        return compute

    computations = [computation(number) for number in range(steps.config.steps)]
    return Chain(communicators, computations, steps.communicate, "auto", steps.config.sms)


def of_chain(steps: Steps, chain: Chain) -> Candidates:
    """Yield the forms among which a chain chooses."""
    for way in chain.ways():
        form = Form(way.run, steps, timeline=lambda name=way.name: timed_chain(chain, name))  # type: ignore[misc]
        yield Candidate(way.name, lambda form=form: form, own=True)  # type: ignore[misc]


def gathered_first(steps: Steps) -> Candidates:
    """Yield the forms of products that read what was gathered: the next is gathered meanwhile."""
    yield on_streams("sequential", steps, LOW, library_product, steps.communicate, in_turn=True)
    yield on_streams("plain", steps, LOW, library_product, steps.communicate)
    if steps.config.device == "cuda":
        yield on_streams("priority", steps, HIGH, library_product, steps.communicate)
        for sms in steps.config.sms:
            yield on_streams(way_on(sms), steps, HIGH, LibraryProduct(sms), by_sms(steps, sms))


def by_sms(steps: Steps, sms: int) -> Message:
    """Return what sends a message on this many SMs."""
    return lambda comm, number: steps.communicate(comm, number, sms)


def prefetch(count: int) -> Schedule:
    """Communicate each input under the computation with the one before."""
    pairs = ((Communicate(f"communicate {i}"), Compute(f"compute {i}", (f"communicate {i}",))) for i in range(count))
    return Schedule(tuple(step for pair in pairs for step in pair))


def on_streams(
    name: str,
    steps: Steps,
    priority: int,
    product: Callable[..., object] | Product,
    message: Message,
    in_turn: bool = False,
) -> Candidate:
    """Return a form on a stream of computation and one of communication; on CPU ranks, on threads."""

    def build() -> Form:
        cuda = steps.config.device == "cuda"
        controller = Controller(StreamLanes(steps.comm, priority) if cuda else lanes_of(steps.comm))
        numbers = range(steps.config.steps)
        plan = (prefetch if steps.config.gathers_first else schedule.chain)(len(numbers))
        if in_turn:
            plan = schedule.sequential(plan)
        computations = {f"compute {number}": lambda n=number: steps.multiply(n, product) for number in numbers}
        messages = {f"communicate {number}": lambda comm, n=number: message(comm, n) for number in numbers}

        works = plan, computations, messages
        return Form(lambda: controller.run(*works), steps, timeline=lambda: timed(controller, *works))

    return Candidate(name, build, own=True)
