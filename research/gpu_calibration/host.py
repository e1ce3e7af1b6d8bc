"""Measure the host's time of a step on a GPU: the engine's own loop, scheduler and model runner, with a small model.

The host's time is what passes from the beginning of a step to that of the next one, less what the loop waits for the
GPU. Steps that graphs replay hardly depend on the number of layers; of others, each layer takes the host's time of its
kernels, which models of several numbers of layers show.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from shotcast.bench import lone_engine
from shotcast.collectives.communicator import Communicator
from shotcast.engine.llm import LLM
from shotcast.engine.model_runner import AsyncModelRunnerOutput, ModelRunner
from shotcast.engine.outputs import ModelRunnerOutput
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.scheduler import SchedulerConfig
from shotcast.engine.step_plan import StepPlan
from shotcast.layers.parallel import Parallel
from shotcast.layers.step_timer import DeviceStepTimer, HostStepTimer
from shotcast.layers.weights import Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.source import open_checkpoint

MODEL = "random:smollm2-135m"
_BLOCK, _SHORT = 16, 16
_WARM = 4
"""Steps of a kind that are left out, of the first ones."""


class HostSteps(NamedTuple):
    """The steps that are measured.

    Attributes:
        layers: numbers of layers of the model.
        sequences: numbers of sequences that decode together.
        prompts: tokens of prompts, each of which is a step.
        output: tokens of an output.
        repeats: the number of prompts of each length.
        rounds: how often everything is measured; the median counts.
    """

    layers: tuple[int, ...] = (2, 8, 30)
    sequences: tuple[int, ...] = (1, 8, 64, 256, 512)
    prompts: tuple[int, ...] = (16, 128, 512, 2048)
    output: int = 40
    repeats: int = 24
    rounds: int = 3

    @property
    def length(self) -> int:
        """The most tokens of a sequence."""
        return max(max(self.prompts), _SHORT) + self.output

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        short = max(self.sequences) * (-(-(_SHORT + self.output) // _BLOCK) + 1)
        return max(short, 2 * (-(-self.length // _BLOCK) + 1))


class _Watched:
    """A model runner that notes the host's time of each step.

    Attributes:
        times_us: by (sequences, tokens) of a step, its times in microseconds.
    """

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self._now: tuple[int, int] | None = None
        self._began = self._waited = 0.0
        self.times_us: dict[tuple[int, int], list[float]] = {}

    @property
    def step_s(self) -> float:
        return self._runner.step_s

    @property
    def communication_s(self) -> float:
        return self._runner.communication_s

    def execute(self, plan: StepPlan) -> _WatchedOutput | None:
        began = time.perf_counter()
        if self._now is not None:
            self.times_us.setdefault(self._now, []).append(1e6 * (began - self._began - self._waited))
        self._now = len(plan.sequences), sum(len(each.tokens) for each in plan.sequences)
        self._began, self._waited = began, 0.0
        output = self._runner.execute(plan)
        return None if output is None else _WatchedOutput(output, self)

    def wait(self, output: AsyncModelRunnerOutput) -> None:
        """Wait for the GPU."""
        began = time.perf_counter()
        while not output.ready:
            pass
        self._waited += time.perf_counter() - began


class _WatchedOutput:
    def __init__(self, output: AsyncModelRunnerOutput, runner: _Watched):
        self._output, self._runner = output, runner

    def result(self) -> ModelRunnerOutput:
        self._runner.wait(self._output)
        return self._output.result()


def measure(device: str, steps: HostSteps) -> list[dict[str, Any]]:
    """Return rows with the host's time of steps, by layers, sequences and tokens, with graphs and without."""
    rounds: list[list[dict[str, Any]]] = []
    with torch.inference_mode(), Communicator(device=device, exclusive=True) as comm, contextlib.ExitStack() as stack:
        models = {layers: _model(comm, layers, steps) for layers in steps.layers}
        runners = {
            (layers, graphs): stack.enter_context(_runner(model, steps, graphs))
            for layers, model in models.items()
            for graphs in (True, False)
        }
        gc.collect()
        gc.freeze()  # as an engine does
        for _ in range(steps.rounds):
            rounds.append([row for way, runner in runners.items() for row in _rows(runner, *way, steps)])
    return [
        row | {"us": median(each["us"] for each in same)}
        for row, same in zip(rounds[0], zip(*rounds, strict=True), strict=True)
    ]


def first_tokens(steps: HostSteps, device: str = "cuda") -> list[dict[str, Any]]:
    """Return rows with the time of first tokens as a client of the engine sees them: one request at a time, and the
    model of the fewest layers."""
    layers = min(steps.layers)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    rows = []
    with LLM(
        f"{MODEL}:{layers}", device=device, max_model_len=steps.length, max_num_seqs=1, prefix_caching=False
    ) as llm:
        for prompt in steps.prompts:
            times = []
            for number in range(_WARM + steps.repeats):
                tokens = [(number + place) % 1000 for place in range(prompt)]
                (output,) = llm.generate([tokens], params)
                times.append(1e6 * (output.ttft_s or 0.0))
            rows.append({"kernel": "first_token", "layers": layers, "prompt": prompt, "us": median(times[_WARM:])})
    return rows


def compile_steps(device: str, steps: HostSteps) -> None:
    """Compile the kernels of the steps."""
    with (
        torch.inference_mode(),
        Communicator(device=device, exclusive=True) as comm,
        _runner(_model(comm, 1, steps), steps, True),
    ):
        pass


def _model(comm: Communicator, layers: int, steps: HostSteps) -> CausalLM:
    on_gpu = comm.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    timer = DeviceStepTimer(comm.device) if on_gpu else HostStepTimer()
    with contextlib.closing(open_checkpoint(f"{MODEL}:{layers}", comm.device)) as checkpoint:
        parallel = Parallel(comm, comm, 1, timer=timer)
        weights = Weights(checkpoint, dtype, comm.device)
        return CausalLM(checkpoint.config, weights, parallel, steps.length, max(steps.sequences))


@contextlib.contextmanager
def _runner(model: CausalLM, steps: HostSteps, graphs: bool) -> Iterator[ModelRunner]:
    sizes = (steps.sequences, tuple(sorted({_SHORT, *steps.prompts}))) if graphs else ((), ())
    runner = ModelRunner(model, steps.blocks, _BLOCK, max(steps.sequences), steps.length, 0, *sizes)
    try:
        runner.capture(stamped=False)
        yield runner
    finally:
        runner.close()


def _rows(runner: ModelRunner, layers: int, graphs: bool, steps: HostSteps) -> Iterator[dict[str, Any]]:
    def served(prompts: Sequence[int], together: int, output: int) -> dict[tuple[int, int], list[float]]:
        watched = _Watched(runner)
        limits = together, max(steps.prompts), _BLOCK, steps.blocks, steps.length, False, runner.lookahead
        lone_engine.serve(watched, SchedulerConfig(*limits), prompts, output)
        return watched.times_us

    def row(sequences: int, tokens: int, times: list[float]) -> dict[str, Any]:
        shape = {"kernel": "host", "graphs": graphs, "layers": layers, "sequences": sequences, "rows": tokens}
        return shape | {"us": median(times[_WARM:])}

    for sequences in steps.sequences:
        times = served([_SHORT] * sequences, sequences, steps.output)
        yield row(sequences, sequences, times[sequences, sequences])
    for prompt in steps.prompts:
        yield row(1, prompt, served([prompt] * steps.repeats, 1, 1)[1, prompt])
