"""Between HTTP and the engine: who is let in, what they get, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial

from shotcast.engine.outputs import RequestOutput
from shotcast.engine.requests import max_output_tokens
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import ConfigError, EngineDead
from shotcast.server.api_error import ApiError
from shotcast.server.config import ServerConfig
from shotcast.server.engine_protocol import Engine
from shotcast.server.metrics import Metrics
from shotcast.server.request_body import Body, bad

Update = tuple[int, RequestOutput]
"""The number of a choice, and its output so far."""

Job = tuple[list[int], SamplingParams]
"""What the engine is asked: the tokens of a prompt, and how to go on."""

RETRY_AFTER_S = 1


class Service:
    """Everything a server holds while it runs; belongs to one event loop."""

    def __init__(self, engine: Engine, config: ServerConfig):
        self.engine = engine
        self.config = config
        self.model = config.served_model_name or engine.model_name
        self.metrics = Metrics(engine)
        self.created = int(time.time())
        self._draining = False
        self._sequences = 0
        self._running: set[_Sequences] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        # A thread, since tokenising a long prompt would hold up everybody's tokens; only one, since not every
        # tokenizer may be used from several.
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")

    def check(self, status_of_death: int = 500) -> None:
        """
        Raises:
            ApiError: 500 (or as said) when the engine died, 503 when the server is about to stop.
        """
        if self.engine.dead is not None:
            raise _dead(self.engine.dead, status_of_death)
        if self._draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    async def generate(self, body: Body, request_id: str) -> AsyncGenerator[Update, None]:
        """All prompts of a request, each as often as it asks: choice number ``prompt * n + i``.

        An update stands for all that happened to its choice since the update before, so whoever reads slowly gets
        fewer. Closing the generator aborts what still runs.

        Raises:
            ApiError: whatever is in the way.
        """
        params = body.sampling()
        with self._admitted(body) as sequences:
            try:
                loop = asyncio.get_running_loop()
                tokenizer = self.engine.tokenizer
                prompts = await loop.run_in_executor(self._tokenizing, body.tokenize, tokenizer)
                jobs = [job for prompt in prompts for job in self._jobs(body, prompt, params)]
                async with aclosing(sequences.run(jobs, request_id)) as updates:
                    async for update in updates:
                        yield update
            except EngineDead as error:
                raise _dead(error) from error
            except ConfigError as error:
                raise bad(body.PROMPT, str(error)) from error

    def _jobs(self, body: Body, prompt: list[int], params: SamplingParams) -> Iterator[Job]:
        """The prompt with parameters for each of its choices."""
        where, most = body.PROMPT, self.config.max_prompt_tokens
        too_long = "context_length_exceeded"
        if most is not None and len(prompt) > most:
            raise bad(where, f"the prompt has {len(prompt)} tokens; this server takes {most}", too_long)
        try:
            room = max_output_tokens(len(prompt), self.engine.max_model_len)
        except ConfigError as error:
            raise bad(where, str(error), too_long if prompt else None) from error
        limit = self.config.max_output_tokens
        param, asked = body.output_limit
        length = room if asked is None else asked
        if limit is not None:
            length = min(length, limit)
        if length > room:
            asked_for = f"the prompt has {len(prompt)} tokens, and {param} is {asked}"
            raise bad(param, f"{asked_for}; together they are at most {self.engine.max_model_len}", too_long)
        for number in range(body.choices):
            # Choices differ from each other and repeat from one request to the next; the sum stays within 64 bits.
            seed = None if params.seed is None else (params.seed + number + 2**63) % 2**64 - 2**63
            yield prompt, replace(params, max_tokens=length, seed=seed)

    @contextmanager
    def _admitted(self, body: Body) -> Iterator[_Sequences]:
        """Room for all of its sequences in the queue."""
        self.check()
        count, limit = body.prompts * body.choices, self.config.max_queue
        if count > limit:
            param = "n" if body.choices > 1 else body.PROMPT
            raise bad(param, f"the {body.PROMPT} times n make {count} outputs; this server takes {limit} at a time")
        if self._sequences + count > limit:
            raise ApiError(
                429,
                f"{self._sequences} of {limit} places in the queue are taken, and this takes {count}; try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        sequences = _Sequences(self.engine, self.metrics)
        self._sequences += count
        self._running.add(sequences)
        self._idle.clear()
        try:
            yield sequences
        finally:
            self._sequences -= count
            self._running.remove(sequences)
            if not self._running:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Let nobody in any more, and wait until all are done; after ``seconds``, end what still runs."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """End all that runs."""
        for sequences in self._running:
            sequences.fail(ApiError(503, "the server is shutting down", code="shutting_down"))

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False)


_FAILED = "abort", "error"
"""Reasons to finish that are no answer."""


class _Sequences:
    """The sequences of one request, side by side in the engine."""

    def __init__(self, engine: Engine, metrics: Metrics):
        self._engine = engine
        self._metrics = metrics
        self._names: dict[int, str] = {}  # of choices that run
        self._fresh: dict[int, RequestOutput] = {}
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    def fail(self, error: BaseException) -> None:
        """Raise this wherever the updates are read."""
        self._failure = error
        self._changed.set()

    async def run(self, jobs: Sequence[Job], request_id: str) -> AsyncGenerator[Update, None]:
        unfinished = set(range(len(jobs)))
        try:
            for number, (prompt, params) in enumerate(jobs):
                name = self._names[number] = f"{request_id}-{number}"
                try:
                    self._engine.start(prompt, params, name, partial(self._take, number))
                except (ConfigError, EngineDead) as error:
                    self._take(number, error)
                    break
            while unfinished:
                await self._changed.wait()
                self._changed.clear()
                fresh, self._fresh = self._fresh, {}
                for number, output in fresh.items():
                    if output.finish_reason in _FAILED:
                        continue  # it has grown since it was told; what it ended with is the failure
                    if number in unfinished:
                        if output.finished:
                            unfinished.remove(number)
                        yield number, output
                if unfinished and self._failure is not None:
                    raise self._failure
        finally:
            for name in self._names.values():
                self._engine.abort(name)
                self._metrics.ended("abort")

    def _take(self, number: int, told: RequestOutput | Exception) -> None:
        """Of a choice: its output as it grows, or why there is no more of it."""
        if isinstance(told, RequestOutput):
            if told.finish_reason == "abort":
                told = ApiError(503, "the engine aborted the request", code="aborted")
            elif told.finish_reason == "error":
                told = ApiError(500, told.error, code="generation_failed")
        if isinstance(told, Exception):
            del self._names[number]
            self._metrics.ended("error")
            self.fail(told)
            return
        self._fresh[number] = told
        self._changed.set()
        if told.finished:
            del self._names[number]
            self._metrics.finished(told)


def _dead(error: BaseException, status: int = 500) -> ApiError:
    return ApiError(status, str(error), code="engine_dead")
