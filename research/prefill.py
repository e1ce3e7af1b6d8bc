"""The time to the first token of one prompt by each form of a step, on tensor-parallel ranks: ms, and what is hidden.

    python research/prefill.py --json benchmarks/data/h200/prefill_x2.json

Weights are random, in the shape of ``--model``; all ranks load it once. Forms are the whole step and the halves of the
engine's ``overlap`` (``engine/prefill_forms.py``), the one that ``auto`` takes, and both with NCCL's sums.
Before anything is timed, the logits after prompts are compared with those of the sequential form. Then the forms take
turns. A time is from the step's plan on the host to the token on the host: the median of the rounds, of the slowest
rank.

Exposed communication is the time of a form minus that of the sequential form without sums. So what dividing costs
counts as exposed, and "hidden" is the part of the sequential form's exposed communication that a form does without.
``without sums`` and ``halves without sums`` show what dividing alone costs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_timing import write
from rich.console import Console
from rich.table import Table

import shotcast
from shotcast import env
from shotcast.bench import kernels
from shotcast.bench.baselines import NCCL_FAVOURABLE
from shotcast.collectives import separate_norm
from shotcast.collectives.norm_operands import norm_operands
from shotcast.collectives.rank_device import gpu_of
from shotcast.engine.model_runner import ModelRunner
from shotcast.engine.prefill_forms import BY_COPIES
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.step_plan import ScheduledSequence, StepPlan
from shotcast.layers.parallel import Parallel
from shotcast.layers.step_timer import DeviceStepTimer, HostStepTimer, StepTimer
from shotcast.layers.weights import Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.source import open_checkpoint
from shotcast.overlap.policy import SEQUENTIAL, Decision

BLOCK = 16
CLOSE = 0.05
"""The largest ratio of norms, of a difference of logits to the logits, at which answers count as equal: rounding of
products in bfloat16, through all layers."""
AUTO, NCCL, NCCL_HALVES = "auto", "nccl", "nccl, halves"
NO_SUMS, NO_SUMS_HALVES = "without sums", "halves without sums"


class Silent(Parallel):
    """Ranks that leave out the sums of blocks: what remains is the computation."""

    def reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, copy_engines: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm, tensors = norm_operands("silent", x.device, x, residual, weight, eps, 1, False, (x, residual))
        separate_norm.norm_sum(x, tensors, norm, self.comm.topology.runs_grids)
        return x, residual


class ByNccl(Parallel):
    """Ranks whose blocks NCCL sums."""

    def reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, copy_engines: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.comm.all_reduce_rms_norm(x, residual, weight, eps, "vendor", out=(x, residual))
        return normed, residual


def joined(model: CausalLM, parallel: Parallel) -> CausalLM:
    """Return a model of the same weights whose blocks add up by ``parallel``."""
    made = copy.copy(model)
    made.parallel, made.blocks = parallel, [copy.copy(block) for block in model.blocks]
    for block in made.blocks:
        block._parallel = parallel
    return made


class Form:
    """A model runner whose steps of ``tokens`` tokens have one form."""

    def __init__(self, model: CausalLM, tokens: int, overlap: str, stack: contextlib.ExitStack):
        self._tokens, blocks = tokens, -(-(tokens + BLOCK) // BLOCK)
        decisions = {} if overlap == AUTO else {tokens: Decision(overlap, "to be measured", {}, {})}
        limits = blocks, BLOCK, 1, tokens + BLOCK
        self._runner = ModelRunner(model, *limits, 7, (1,), (tokens,), True, AUTO, tokens, decisions)
        stack.callback(self._runner.close)
        with torch.inference_mode():
            self._runner.capture(stamped=False)
        self._blocks = tuple(range(blocks))
        self.decision = self._runner.overlap[tokens]

    def first_token(self, prompt: tuple[int, ...]) -> int:
        """Compute the prompt and return the likeliest token."""
        params = SamplingParams(temperature=0.0)
        sequence = ScheduledSequence(0, 0, prompt, self._blocks, True, True, params, "prompt", ())
        output = self._runner.execute(StepPlan(0, (sequence,)))
        assert output is not None
        return output.result().tokens[0]

    def logits(self, prompt: tuple[int, ...]) -> torch.Tensor:
        """Return the logits after the prompt."""
        self.first_token(prompt)
        graphs = self._runner._prefill_graphs
        assert graphs is not None
        return graphs._results[1].values[0].clone()


def measured(model_name: str, device: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each form; as one rank."""
    with contextlib.ExitStack() as stack:
        cuda = device == "cuda"
        own = torch.device("cuda", gpu_of(int(os.environ["LOCAL_RANK"]))) if cuda else torch.device("cpu")
        checkpoint = open_checkpoint(model_name, own)
        stack.callback(checkpoint.close)
        config, dtype = checkpoint.config, torch.bfloat16 if cuda else torch.float32
        nbytes = max(tokens * config.hidden, config.vocab) * dtype.itemsize
        comm = stack.enter_context(
            shotcast.Communicator(device=device, max_bytes=nbytes, timeout_s=120, exclusive=True)
        )
        timer: StepTimer = DeviceStepTimer(comm.device) if cuda else HostStepTimer()
        started = time.perf_counter()
        model = CausalLM(
            config, Weights(checkpoint, dtype, comm.device), Parallel(comm, timer=timer), tokens + BLOCK, 1
        )
        by_nccl = joined(model, ByNccl(comm, timer=timer))
        silent = joined(model, Silent(comm, timer=timer))
        makers: dict[str, Callable[[], Form]] = {
            form: lambda form=form: Form(model, tokens, form, stack)
            for form in (SEQUENTIAL, BY_COPIES, AUTO)  # type: ignore[misc]
        }
        if cuda and env.local_world_size() <= torch.cuda.device_count():  # NCCL takes no two ranks on a GPU
            makers[NCCL] = lambda: Form(by_nccl, tokens, SEQUENTIAL, stack)
            makers[NCCL_HALVES] = lambda: Form(by_nccl, tokens, BY_COPIES, stack)
        makers[NO_SUMS] = lambda: Form(silent, tokens, SEQUENTIAL, stack)
        makers[NO_SUMS_HALVES] = lambda: Form(silent, tokens, BY_COPIES, stack)
        draw = np.random.default_rng(1)
        prompts = [tuple(draw.integers(config.vocab, size=tokens).tolist()) for _ in range(3)]
        if comm.rank == 0:
            print(f"loaded {config.layers} layers in {time.perf_counter() - started:.0f} s", flush=True)
        forms, errors = {}, {}
        for name, make in makers.items():
            began = time.perf_counter()
            forms[name] = make()
            errors[name] = max(
                float((forms[name].logits(prompt) - right).norm() / right.norm())
                for prompt in prompts[:2]
                for right in [forms[SEQUENTIAL].logits(prompt)]
            )
            comm.check()
            if comm.rank == 0:
                took = time.perf_counter() - began
                print(f"{name}: captured in {took:.0f} s, logits differ by {errors[name]:.2g}", flush=True)
        timed = [name for name in forms if name.endswith(NO_SUMS) or max(comm._host.all_gather(errors[name])) <= CLOSE]
        times = times_ms(comm, {name: forms[name] for name in timed}, prompts, rounds)
        found = rows(times, errors, {name: str(form.decision) for name, form in forms.items()})
        return [row | {"layers": config.layers, "dtype": str(dtype).removeprefix("torch.")} for row in found]


def times_ms(
    comm: shotcast.Communicator, forms: dict[str, Form], prompts: list[tuple[int, ...]], rounds: int
) -> dict[str, float]:
    """Return the median time of each form, of the slowest rank; each begins a round in turn."""
    names = list(forms)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            comm.barrier()
            if comm.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            forms[name].first_token(prompts[number % len(prompts)])
            times[name].append((time.perf_counter() - began) * 1e3)
            comm.check()
    return {name: max(comm._host.all_gather(median(times[name]))) for name in names}


def rows(times: dict[str, float], errors: dict[str, float], decisions: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row for each form, with what it leaves exposed and what it hides."""
    alone, sequential = times[NO_SUMS], times[SEQUENTIAL]
    found = []
    for name, error in errors.items():
        row = {"form": name, "error": error, "decision": decisions[name], "ttft_ms": times.get(name)}
        if name in times and not name.endswith(NO_SUMS):
            row["exposed_ms"] = times[name] - alone
            row["hidden"] = 1 - (times[name] - alone) / (sequential - alone) if sequential > alone else None
        found.append(row)
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return the table of a result file."""
    of = result["environment"]
    lines = [
        f"{of['model']}, {of['layers']} layers, {of['ranks']} ranks, {of['tokens']} tokens, {of['dtype']}",
        "",
        "| form | time to first token, ms | over sequential | exposed, ms | hidden |",
        "|---|---|---|---|---|",
    ]
    whole = next(row["ttft_ms"] for row in result["rows"] if row["form"] == SEQUENTIAL)
    for row in result["rows"]:
        cells = ["wrong", "", "", ""]
        if row["ttft_ms"] is not None:
            hidden, exposed = row.get("hidden"), row.get("exposed_ms")
            cells = [
                f"{row['ttft_ms']:.1f}",
                f"{row['ttft_ms'] / whole:.3f}",
                "" if exposed is None else f"{exposed:.1f}",
                "" if hidden is None else f"{hidden:.0%}",
            ]
        lines.append(f"| {row['form']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama-3.1-70b")
    parser.add_argument("--device", default="cuda", help="cpu, with TRITON_INTERPRET=1, tries the script")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="the file for the results")
    parser.add_argument("--markdown", type=Path, help="print the table of a result file instead of measuring")
    return parser


def main() -> None:
    asked = options().parse_args()
    if asked.markdown:
        print(markdown(json.loads(asked.markdown.read_text())))
        return
    settings = {**NCCL_FAVOURABLE, "SHOTCAST_CHECK_VENDOR": "0"}  # nothing of ours is added to a call of NCCL
    arguments = asked.model, asked.device, asked.tokens, asked.rounds
    found = shotcast.spawn(measured, asked.world_size, *arguments, timeout_s=570, env=settings)[0]
    table = Table("form", "TTFT, ms", "exposed, ms", "hidden", "error", "decision")
    for row in found:
        figures = [row["ttft_ms"], row.get("exposed_ms"), row.get("hidden")]
        table.add_row(
            row["form"],
            *("" if one is None else f"{one:.3g}" for one in figures),
            f"{row['error']:.1g}",
            row["decision"],
        )
    Console(width=160).print(table)
    if asked.json:
        facts = {"model": asked.model, "ranks": asked.world_size, "tokens": asked.tokens, "layers": found[0]["layers"]}
        facts["dtype"] = found[0]["dtype"]
        write(asked.json, found, kernels.of_collectives("cuda"), **facts)
    if wrong := [row["form"] for row in found if row["error"] > CLOSE and not row["form"].endswith(NO_SUMS)]:
        raise SystemExit(f"other answers than one step as a whole gives: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
