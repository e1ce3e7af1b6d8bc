"""Our engine beside vLLM's on the same GPUs, in turns: ms a token, ms to the first token, tokens/s, and a load.

    python research/engine_turns.py --json benchmarks/data/h200/vllm_turns_x2.json

vLLM must be importable. Both start at once; then no other load and no other clock falls on one of them. The model has
the shape of Llama 3.1 8B and random weights, in bfloat16, and no prefix is kept. A time a token is that of 129 tokens
less that of one, over 128; prompts have 32 tokens. The first token is that of one prompt alone. Tokens/s are those of
requests with 512 tokens and 128 to sample, all at once. The load is as many requests, at random moments that are the
same for both, so many in a second on average as are ``--load`` of what the slower engine answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import vllm_engines
from gpu_timing import write
from rich.console import Console
from rich.table import Table
from vllm_engines import Child

from shotcast import SamplingParams
from shotcast.bench import kernels
from shotcast.models.presets import preset

PROMPT, OUTPUT = 512, 128
"""Tokens of the requests of a load."""
CACHE = 14 << 30
"""Bytes of keys and values of each engine, if both share GPUs."""
MODEL = "llama-3.1-8b"


class Answered(NamedTuple):
    """The seconds from a request to its first and to its last token."""

    first_s: float
    last_s: float


class Ours:
    """Our engine."""

    def __init__(self, asked: argparse.Namespace):
        from shotcast.engine.async_llm import AsyncLLM

        cache = {"kv_cache_bytes": CACHE} if asked.device == "cuda" else {}
        self._llm = AsyncLLM(
            f"random:{asked.model}",
            device=asked.device,
            tensor_parallel=asked.tensor_parallel,
            max_model_len=asked.max_model_len,
            max_num_seqs=256,
            prefix_caching=False,
            **cache,
        )
        self._count = 0

    async def answer(self, prompt: list[int], tokens: int) -> Answered:
        """Complete a prompt."""
        began, self._count = time.perf_counter(), self._count + 1
        times: list[float] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_output(output: Any) -> None:
            times.append(time.perf_counter() - began)
            if isinstance(output, Exception):
                done.set_exception(output)
            elif output.finished:
                done.set_result(None)

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self._llm.start(prompt, params, str(self._count), on_output)
        await done
        return Answered(times[0], times[-1])

    async def close(self) -> None:
        await self._llm.close()


class Vllm:
    """vLLM's engine, of the shape of Llama 3.1 8B."""

    def __init__(self, asked: argparse.Namespace):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(vllm_engines.SHAPE))
            arguments = AsyncEngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                tensor_parallel_size=asked.tensor_parallel,
                dtype="bfloat16",
                max_model_len=asked.max_model_len,
                max_num_seqs=256,
                gpu_memory_utilization=0.3,  # a share of what is free; keys and values have a number of their own
                kv_cache_memory_bytes=CACHE,
                enable_prefix_caching=False,
                kernel_config={"enable_flashinfer_autotune": False},
            )
            self._llm = AsyncLLM.from_engine_args(arguments)
        self._count = 0

    async def ready(self) -> None:
        """Give its matrices random weights."""
        await self._llm.collective_rpc(vllm_engines.set_weights)

    async def answer(self, prompt: list[int], tokens: int) -> Answered:
        """Complete a prompt."""
        from vllm import SamplingParams as VllmParams

        began, self._count = time.perf_counter(), self._count + 1
        params = VllmParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)
        first = 0.0
        async for _ in self._llm.generate({"prompt_token_ids": prompt}, params, str(self._count)):
            first = first or time.perf_counter() - began
        return Answered(first, time.perf_counter() - began)

    async def close(self) -> None:
        self._llm.shutdown()


def arrivals(rate: float, requests: int, seed: int) -> list[float]:
    """Return random moments in seconds, so many in a second on average as ``rate``."""
    drawn = random.Random(seed)
    return list(itertools.accumulate(drawn.expovariate(rate) for _ in range(requests)))


class Steps:
    """The steps that an engine is asked for; each returns what is written down."""

    def __init__(self, engine: Any, vocab: int):
        self._engine, self._vocab = engine, vocab

    def _prompt(self, number: int, tokens: int) -> list[int]:
        """Return a prompt that no other number has."""
        return [(7919 * number + 31 * place) % (self._vocab - 200) + 100 for place in range(tokens)]

    async def _burst(self, prompts: list[list[int]], tokens: int) -> float:
        """Return the seconds that prompts take which arrive at once."""
        began = time.perf_counter()
        await asyncio.gather(*(self._engine.answer(prompt, tokens) for prompt in prompts))
        return time.perf_counter() - began

    async def ms_a_token(self, sequences: int, tokens: int) -> float:
        prompts = [self._prompt(number, 32) for number in range(sequences)]
        await self._burst(prompts, 4)
        first = await self._burst(prompts, 1)
        return round((await self._burst(prompts, tokens + 1) - first) / tokens * 1e3, 4)

    async def first_ms(self, tokens: int, turn: int) -> float:
        return round((await self._engine.answer(self._prompt(1000 + turn, tokens), 1)).first_s * 1e3, 3)

    async def tokens_per_s(self, requests: int, turn: int) -> float:
        prompts = [self._prompt(2000 + 500 * turn + number, PROMPT) for number in range(requests)]
        return round(requests * OUTPUT / await self._burst(prompts, OUTPUT), 1)

    async def load(self, rate: float, requests: int, seed: int) -> dict[str, Any]:
        """Serve requests at random moments. Returns percentiles of ms to the first token and a later token.

        Args:
            rate: of requests in a second, on average.
            seed: of the moments.
        """

        async def one(number: int, wait_s: float) -> Answered:
            await asyncio.sleep(wait_s)
            return await self._engine.answer(self._prompt(5000 + number, PROMPT), OUTPUT)

        found = await asyncio.gather(*(one(*each) for each in enumerate(arrivals(rate, requests, seed))))
        firsts = sorted(one.first_s * 1e3 for one in found)
        laters = sorted((one.last_s - one.first_s) / (OUTPUT - 1) * 1e3 for one in found)
        percents = {"p50": requests // 2, "p99": min(requests - 1, requests * 99 // 100)}
        return {
            name: {percent: round(values[place], 2) for percent, place in percents.items()}
            for name, values in (("first_ms", firsts), ("later_ms", laters))
        }


ENGINES = {"shotcast": Ours, "vLLM": Vllm}


def serve(asked: argparse.Namespace) -> None:
    """Make the steps that the lines of stdin ask for; answer each with a line of JSON, after one of the start."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def opened() -> Any:  # vLLM begins tasks
        engine = ENGINES[asked.engines](asked)
        if isinstance(engine, Vllm):
            await engine.ready()
        return engine

    with os.fdopen(asked.serve, "w") as answers:
        began = time.monotonic()
        engine = loop.run_until_complete(opened())
        steps = Steps(engine, preset(asked.model).vocab)
        print(json.dumps({"ready_s": round(time.monotonic() - began, 1)}), file=answers, flush=True)
        for line in sys.stdin:
            step = json.loads(line)
            make: Callable[..., Coroutine[Any, Any, Any]] = getattr(steps, step.pop("step"))
            print(json.dumps({"value": loop.run_until_complete(make(**step))}), file=answers, flush=True)
        loop.run_until_complete(engine.close())


def in_turns(children: dict[str, Child], asked: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Let engines take their steps in turns, and add a row of each measured value, or median, to ``rows``."""

    def each(step: str, rounds: int, **what: Any) -> list[Any]:
        found: dict[str, list[Any]] = {name: [] for name in children}
        for turn in range(rounds):
            for name in list(children)[:: -1 if turn % 2 else 1]:
                told = what | ({"turn": turn} if step in ("first_ms", "tokens_per_s") else {})
                answer = children[name].step(step, **told)
                if answer is None:
                    raise RuntimeError(f"{name} ended at {step} {told}: see its log")
                found[name].append(answer["value"])
        values = [median(of) if rounds > 1 else of[0] for of in found.values()]
        for name, value in zip(found, values, strict=True):
            rows.append({"by": name, "step": step, **what, "value": value, "of": found[name]})
            print(rows[-1], flush=True)
        return values

    for name, child in children.items():
        ready = child.answer()
        if ready is None:
            raise RuntimeError(f"{name} did not start: see its log")
        rows.append({"by": name, "step": "ready_s", "value": ready["ready_s"]})
    for sequences in asked.sequences:
        each("ms_a_token", 3, sequences=sequences, tokens=asked.tokens)
    for tokens in asked.prompts:
        each("first_ms", 6, tokens=tokens)  # the first turn may compile
    capacity = 0.0
    for requests in asked.requests:
        capacity = min(each("tokens_per_s", 2, requests=requests)) / OUTPUT
    for share in asked.load:
        each("load", 1, rate=round(share * capacity, 3), requests=asked.arrivals, seed=7)


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return the values, with the ratio of the first engine's to the last one's."""
    names = list(dict.fromkeys(row["by"] for row in rows))
    table = Table("", *names, "ratio")
    lines: dict[str, dict[str, float]] = {}
    for row in rows:
        what = " ".join(f"{name} {row[name]}" for name in ("sequences", "tokens", "requests", "rate") if name in row)
        values = {"": row["value"]}
        if isinstance(row["value"], dict):
            values = {f" {name} {at}": one for name, by in row["value"].items() for at, one in by.items()}
        for name, value in values.items():
            lines.setdefault(f"{row['step']} {what}{name}", {})[row["by"]] = value
    for label, by in lines.items():
        shown = [f"{by[name]:g}" if name in by else "" for name in names]
        both = len(by) == len(names) > 1 and by[names[-1]] > 0
        table.add_row(label, *shown, f"{by[names[0]] / by[names[-1]]:.3f}" if both else "")
    return table


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), help="those to run")
    parser.add_argument("--model", default=MODEL, help="a preset, for our engine alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: for our engine alone")
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--sequences", type=numbers, default=[1, 8, 64, 256], help="that decode at once")
    parser.add_argument("--tokens", type=int, default=128, help="to decode of each")
    parser.add_argument("--prompts", type=numbers, default=[512, 4000, 30000], help="tokens of prompts alone")
    parser.add_argument("--requests", type=numbers, default=[64, 256], help="at once")
    parser.add_argument("--load", type=lambda text: [float(one) for one in text.split(",") if one], default=[0.7, 0.9])
    parser.add_argument("--arrivals", type=int, default=400, help="requests of a load")
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.gettempdir()), help="a folder for what engines print"
    )
    parser.add_argument("--json", type=Path, help="a file for results")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    asked = options().parse_args()
    if asked.serve is not None:
        serve(asked)
        return
    shape = f"--model={asked.model} --device={asked.device} --tensor-parallel={asked.tensor_parallel}".split()
    shape += [f"--max-model-len={asked.max_model_len}"]
    children: dict[str, Child] = {}
    rows: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # engines end too, and results are kept
    try:
        for name in asked.engines.split(","):
            command = [sys.executable, __file__, f"--engines={name}", *shape, "--serve"]
            children[name] = Child(command, vllm_engines.PLAIN, asked.logs / f"engine_{name}.log")
        in_turns(children, asked, rows)
    finally:
        for child in children.values():
            child.end()
        if rows:
            Console(width=160).print(table_of(rows))
        if rows and asked.json is not None:
            write(asked.json, rows, kernels.of_collectives(asked.device))


if __name__ == "__main__":
    main()
