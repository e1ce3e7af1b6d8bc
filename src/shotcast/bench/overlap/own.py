"""Our forms: messages by our kernels and copy engines, under products that are or are not shaped for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shotcast.bench.overlap.config import COMMUNICATION, COMPUTE, REDUCE_SCATTER_ALL_GATHER
from shotcast.bench.overlap.form import Candidate, Candidates, Form, in_one
from shotcast.bench.overlap.steps import Steps, library_product
from shotcast.collectives.communicator import Communicator
from shotcast.overlap import schedule
from shotcast.overlap.chains import Chain
from shotcast.overlap.controller import Controller
from shotcast.overlap.gathered_products import all_gather_matmul
from shotcast.overlap.lanes import HIGH, LOW, StreamLanes, lanes_of
from shotcast.overlap.products import LibraryProduct, Product, ShapedProduct, own_gemm, sms_of
from shotcast.overlap.summed_products import FUSED, matmul_all_reduce, matmul_reduce_scatter

BESIDE_SMS = 24
"""SMs of a message whose kernels fit beside a block of our product on every SM."""
SUM_SMS = 16
"""SMs that products leave to the sums between copies."""
_ENGINES, _MEETING_SMS = "copy_engines", 1
"""The algorithm by copy engines, and the SMs of the kernels in which ranks meet."""

Message = Callable[[Communicator, int], Any]


def as_published() -> ShapedProduct:
    """Return a product of the faster of the publication's tiles (arXiv 2606.09200), which leave room on every SM."""
    return ShapedProduct(own_gemm().GemmConfig(64, 64, 64, 3, 4))


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
        form = Form(way.run, steps, timeline=lambda name=way.name: chain.timed(name)[1])  # type: ignore[misc]
        yield Candidate(way.name, lambda form=form: form, own=True)  # type: ignore[misc]


def gathered_first(steps: Steps) -> Candidates:
    """Yield the forms of products that read what was gathered: the next is gathered meanwhile."""
    yield _streams("sequential", steps, LOW, library_product, steps.communicate, in_turn=True)
    yield _streams("plain", steps, LOW, library_product, steps.communicate)
    if steps.config.device == "cuda":
        yield _streams("priority", steps, HIGH, library_product, steps.communicate)
        yield from _on_few_sms(steps)


def shaped(steps: Steps) -> Candidates:
    """Yield the forms on GPUs that a chain does not try: with our products, and with copy engines."""
    product = ShapedProduct()
    few = _by(steps, BESIDE_SMS)
    yield _streams("shaped", steps, LOW, product, few)
    yield _streams("shaped, priority", steps, HIGH, product, few)
    yield _streams("shaped as published, priority", steps, HIGH, as_published(), few)
    for sms in steps.config.sms:
        yield _streams(f"{sms} SMs, shaped", steps, HIGH, _leaving(steps, sms), _by(steps, sms))
    if not steps.config.gathers_first:
        yield from copy_engines(steps)


def _on_few_sms(steps: Steps) -> Candidates:
    for sms in steps.config.sms:
        yield _streams(f"{sms} SMs", steps, HIGH, LibraryProduct(sms), _by(steps, sms))


def copy_engines(steps: Steps) -> Candidates:
    """Yield the forms whose bytes copy engines move; sums take SMs for a moment."""
    op = steps.config.op
    if op in ("all_gather", "all_to_all"):

        def message(comm: Communicator, number: int) -> None:
            steps.communicate(comm, number, sms=_MEETING_SMS, algorithm=_ENGINES)

    else:
        parts: list[torch.Tensor] = []

        def message(comm: Communicator, number: int) -> None:
            sent = steps.sent[number]
            if not parts:  # messages have one lane, so the next uses the same memory
                parts.append(torch.empty_like(sent))
                parts.append(sent.new_empty(sent.numel() // comm.world_size))
            comm.all_to_all(sent, out=parts[0], sms=_MEETING_SMS, algorithm=_ENGINES)
            shard = steps.received[number] if op == "reduce_scatter" else parts[1]
            torch.sum(parts[0].view(comm.world_size, -1), 0, out=shard)
            if op in ("all_reduce", REDUCE_SCATTER_ALL_GATHER):
                comm.all_gather(shard, out=steps.received[number], sms=_MEETING_SMS, algorithm=_ENGINES)

    yield _streams("copy engines", steps, HIGH, library_product, message)
    yield _streams("copy engines, shaped", steps, HIGH, _leaving(steps, SUM_SMS), message)


def fused(steps: Steps, way: str = FUSED) -> Candidates:
    """Yield the forms whose matmul and message are one call, on whole matrices."""
    comm, op = steps.comm, steps.config.op
    if not steps.config.whole:
        return

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if op == "all_gather":
            return all_gather_matmul(comm, a, b, way=way).products[0]
        return (matmul_all_reduce if op == "all_reduce" else matmul_reduce_scatter)(comm, a, b, way=way)

    yield Candidate(way, lambda: in_one(steps, multiply), own=True)


def _by(steps: Steps, sms: int) -> Message:
    return lambda comm, number: steps.communicate(comm, number, sms)


def _leaving(steps: Steps, sms: int) -> Product:
    """Return our product on all SMs but this many."""
    device = steps.comm.device
    return ShapedProduct(sms=sms_of(device) - sms if device.type == "cuda" else None)


def _streams(
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
        plan = (schedule.prefetch if steps.config.gathers_first else schedule.chain)(len(numbers))
        if in_turn:
            plan = schedule.sequential(plan)
        computations = {f"compute {number}": lambda n=number: steps.multiply(n, product) for number in numbers}
        messages = {f"communicate {number}": lambda comm, n=number: message(comm, n) for number in numbers}

        def timeline() -> Any:
            return controller.timed(plan, computations, messages)[1]

        return Form(lambda: controller.run(plan, computations, messages), steps, timeline=timeline)

    return Candidate(name, build, own=True)
