"""Functions that ranks of research/tests/test_overlap_bench.py run."""

from __future__ import annotations

from dataclasses import replace

import torch
from overlap_bench.config import OverlapConfig
from overlap_bench.form import in_one
from overlap_bench.steps import Steps

from shotcast.collectives.communicator import Communicator


def out_of_order(config: OverlapConfig) -> dict[str, str]:
    """Return what is found to be wrong with forms that do one thing too early, or not at all."""
    found = {}
    with Communicator(device="cpu") as comm, torch.no_grad():
        steps = Steps(config, comm, config.nbytes, 1)

        def step(number: int) -> None:
            if config.gathers_first:
                steps.communicate(comm, number)
                steps.multiply(number)
            else:
                steps.multiply(number)
                steps.communicate(comm, number)

        def reversed_step(number: int) -> None:
            if config.gathers_first:
                steps.multiply(number)
                steps.communicate(comm, number)
            else:
                steps.communicate(comm, number)
                steps.multiply(number)

        for name, last in (("in order", step), ("too early", reversed_step), ("left out", lambda number: None)):
            steps.load()
            for number in range(config.steps - 1):
                step(number)
            last(config.steps - 1)
            found[name] = steps.wrong()
    return found


def in_one_call(config: OverlapConfig) -> list[str]:
    """Return what is wrong with a form whose product and message are one call."""
    with Communicator(device="cpu") as comm, torch.no_grad():
        found = []
        for op in ("all_reduce", "reduce_scatter", "all_gather"):
            steps = Steps(replace(config, op=op), comm, 0, 1)

            def multiply(a: torch.Tensor, b: torch.Tensor, op: str = op) -> torch.Tensor:
                if op == "all_gather":
                    return comm.all_gather(a) @ b
                return (comm.all_reduce if op == "all_reduce" else comm.reduce_scatter)(a @ b)

            form = in_one(steps, multiply)
            form.steps.load()
            form.run()
            found.append(form.wrong())
            (form.steps.products if op == "all_gather" else form.steps.received)[1].zero_()
            found.append(form.wrong())
        return found
