"""The service between HTTP and the engine: it admits, runs and ends requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from shotcast.engine.grammar import Grammar
from shotcast.engine.outputs import RequestOutput
from shotcast.engine.requests import CheckedPrompt, max_output_tokens
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import ConfigError, EngineDead
from shotcast.server.api_error import ApiError
from shotcast.server.config import ServerConfig
from shotcast.server.metrics import Metrics
from shotcast.server.request_body import AnyBody, Body, DetokenizeBody, TokenizeBody, bad_request, parse, shown
from shotcast.server.responses import detokenized, tokenized

if TYPE_CHECKING:
    from shotcast.engine.async_llm import AsyncLLM

T = TypeVar("T")

Update = tuple[int, RequestOutput]
"""The number of a choice, and its output so far."""

Choice = tuple[CheckedPrompt, SamplingParams]
"""One choice for the engine: a prompt's tokens, and the sampling parameters."""

Prepare = Callable[[list[list[int]]], None] | None

SMALL_BODY_BYTES = 8192
"""The largest body parsed in the event loop, which takes less than a millisecond."""

RETRY_AFTER_S = 1
"""The retry time of rejected requests."""


class Service:
    """The state of a running server. It belongs to one event loop."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig):
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
        # Threads, since parsing a large body or tokenizing a long prompt would delay the tokens of all requests; one of
        # each kind, since some tokenizers are not thread-safe, and the event loop shares the interpreter with them.
        self._parsing = ThreadPoolExecutor(1, "parse")
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self._compiling = ThreadPoolExecutor(1, "compile")
        self._bodies = 0  # that are being parsed, or wait for it

    def check(self, dead_status: int = 500) -> None:
        """Raise ApiError if the server cannot serve: ``dead_status`` if the engine died, 503 if it is about to stop."""
        if self.engine.dead is not None:
            raise _dead_error(self.engine.dead, dead_status)
        if self._draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    async def parse(self, kind: type[AnyBody], raw: bytes) -> AnyBody:
        """Parse a request body; large ones on a thread. Raises ApiError: status 400 with the problem and the parameter;
        429 if too many bodies are waiting for the thread.
        """
        if len(raw) <= SMALL_BODY_BYTES:
            return parse(kind, raw)
        if self._bodies >= self.config.max_queue:
            raise _queue_full(f"{self._bodies} large bodies wait to be read")
        self._bodies += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._parsing, parse, kind, raw)
        finally:
            self._bodies -= 1

    async def with_tokenizer(self, function: Callable[[], T]) -> T:
        """Run a slow function on the thread that uses the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    async def generate(self, body: Body, request_id: str, prepare: Prepare = None) -> AsyncGenerator[Update, None]:
        """Complete all prompts of a request, ``n`` times each, and yield updates of choices ``prompt * n + i``.

        An update covers everything that happened to its choice since the previous one, so slow readers get fewer.
        Closing the generator aborts the choices that are still running.

        Raises ApiError if the request cannot be served, or fails.

        Args:
            prepare: the response's preparations, called on the tokenizer's thread with the checked tokens of the
                prompts.
        """
        params = body.sampling(self.engine.sampling_defaults)
        _check_tokens(params, self.engine.vocab)
        with self._admit(body) as sequences:
            try:
                if body.grammar_source is not None:
                    params = replace(params, grammar=await self._grammar(body))
                choices = await self.with_tokenizer(partial(self._choices, body, params, prepare))
                async with aclosing(sequences.run(choices, request_id)) as updates:
                    async for update in updates:
                        yield update
            except EngineDead as error:
                raise _dead_error(error) from error
            except ConfigError as error:
                raise bad_request(body.PROMPT, str(error)) from error

    async def _grammar(self, body: Body) -> Grammar | None:
        """Return the grammar of the output after checking that it compiles."""

        def compiled() -> Grammar | None:
            grammar = body.grammar(self.engine.tokenizer)
            if grammar is not None:
                self.engine.check_grammar(grammar)
            return grammar

        try:
            return await asyncio.get_running_loop().run_in_executor(self._compiling, compiled)
        except ConfigError as error:
            raise bad_request(body.grammar_source, f"{body.grammar_source}: {error}") from error

    def _choices(self, body: Body, params: SamplingParams, prepare: Prepare) -> list[Choice]:
        prompts = [self._truncate(body, prompt) for prompt in body.tokenize(self.engine.tokenizer)]
        lengths = [self._output_length(body, len(prompt)) for prompt in prompts]
        checked = [self.engine.check_prompt(prompt) for prompt in prompts]
        if prepare is not None:
            prepare(prompts)
        return [
            (prompt, params.for_choice(length, _choice_seed(params.seed, number)))
            for prompt, length in zip(checked, lengths, strict=True)
            for number in range(body.choices)
        ]

    def _truncate(self, body: Body, prompt: list[int]) -> list[int]:
        """Return the last tokens of a prompt: as many as requested, or as leave room for the output."""
        kept = body.truncate_prompt_tokens
        if kept is None:
            return prompt
        if kept == -1:
            output = min(body.output_limit[1] or 1, self.config.max_output_tokens or self.engine.max_model_len)
            kept = max(1, self.engine.max_model_len - output)
            kept = min(kept, self.config.max_prompt_tokens or kept)
        return prompt[-kept:]

    def _output_length(self, body: Body, prompt_tokens: int) -> int:
        prompt_limit, output_limit = self.config.max_prompt_tokens, self.config.max_output_tokens
        too_long = "context_length_exceeded"
        if prompt_limit is not None and prompt_tokens > prompt_limit:
            message = f"the prompt has {prompt_tokens} tokens; this server takes {prompt_limit}"
            raise bad_request(body.PROMPT, message, too_long)
        try:
            room = max_output_tokens(prompt_tokens, self.engine.max_model_len)
        except ConfigError as error:
            raise bad_request(body.PROMPT, str(error), too_long if prompt_tokens else None) from error
        param, requested = body.output_limit
        default = min(room, self.engine.sampling_defaults.get("max_tokens", room))
        length = default if requested is None else requested
        if output_limit is not None:
            length = min(length, output_limit)
        if length > room:
            message = f"the prompt has {prompt_tokens} tokens, and {param} is {shown(requested)}"
            raise bad_request(param, f"{message}; together they are at most {self.engine.max_model_len}", too_long)
        return length

    async def tokenize(self, body: TokenizeBody) -> bytes:
        """Return the JSON response of ``/tokenize``. Raises ApiError on failure."""
        with self._reserve(1):
            try:
                return await self.with_tokenizer(
                    lambda: tokenized(body, self.engine.tokenizer, self.engine.max_model_len)
                )
            except ConfigError as error:
                raise bad_request(body.source, str(error)) from error

    async def detokenize(self, body: DetokenizeBody) -> bytes:
        """Return the JSON response of ``/detokenize``. Raises ApiError if the queue is full."""
        with self._reserve(1):
            return await self.with_tokenizer(lambda: detokenized(body, self.engine.tokenizer))

    @contextmanager
    def _reserve(self, count: int) -> Iterator[None]:
        self.check()
        limit = self.config.max_queue
        if self._sequences + count > limit:
            raise _queue_full(f"{self._sequences} of {limit} queue places are taken, and this request needs {count}")
        self._sequences += count
        try:
            yield
        finally:
            self._sequences -= count

    @contextmanager
    def _admit(self, body: Body) -> Iterator[_Sequences]:
        count, limit = body.prompts * body.choices, self.config.max_queue
        if count > limit:
            param = "n" if body.choices > 1 else body.PROMPT
            raise bad_request(
                param, f"the {body.PROMPT} times n make {count} outputs; this server takes {limit} at a time"
            )
        with self._reserve(count):
            sequences = _Sequences(self.engine, self.metrics)
            self._running.add(sequences)
            self._idle.clear()
            try:
                yield sequences
            finally:
                self._running.remove(sequences)
                if not self._running:
                    self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Reject new requests and wait for all others; after ``seconds``, end those still running."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        for sequences in self._running:
            sequences.fail(ApiError(503, "the server is shutting down", code="shutting_down"))

    def close(self) -> None:
        self._parsing.shutdown(wait=False)
        self._tokenizing.shutdown(wait=False)
        self._compiling.shutdown(wait=False)


_FAILED = "abort", "error"
"""Finish reasons of outputs that failed."""


class _Sequences:
    """The sequences of one request, which run together in the engine."""

    def __init__(self, engine: AsyncLLM, metrics: Metrics):
        self._engine = engine
        self._metrics = metrics
        self._request_ids: dict[int, str] = {}  # of the choices that run
        self._updated: dict[int, RequestOutput] = {}
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in the reader of the updates."""
        self._failure = error
        self._changed.set()

    async def run(self, choices: Sequence[Choice], request_id: str) -> AsyncGenerator[Update, None]:
        """Run the choices, and yield their updates. Aborts unfinished choices at the end."""
        unfinished = set(range(len(choices)))
        try:
            for number, (prompt, params) in enumerate(choices):
                engine_id = self._request_ids[number] = f"{request_id}-{number}"
                try:
                    self._engine.start(prompt, params, engine_id, partial(self._on_output, number))
                except (ConfigError, EngineDead) as error:
                    self._on_output(number, error)
                    break
            while unfinished:
                await self._changed.wait()
                self._changed.clear()
                updated, self._updated = self._updated, {}
                for number, output in updated.items():
                    if output.finish_reason in _FAILED:
                        continue  # it has failed since the update; the failure is raised below
                    if number in unfinished:
                        if output.finished:
                            unfinished.remove(number)
                        yield number, output
                if unfinished and self._failure is not None:
                    raise self._failure
        finally:
            for engine_id in self._request_ids.values():
                self._engine.abort(engine_id)
                self._metrics.ended("abort")

    def _on_output(self, number: int, result: RequestOutput | Exception) -> None:
        """Process an update of a choice: its output so far, or the error that ended it."""
        if isinstance(result, RequestOutput):
            if result.finish_reason == "abort":
                result = ApiError(503, "the engine aborted the request", code="aborted")
            elif result.finish_reason == "error":
                result = ApiError(500, result.error, code="generation_failed")
        if isinstance(result, Exception):
            del self._request_ids[number]
            self._metrics.ended("error")
            self.fail(result)
            return
        self._updated[number] = result
        self._changed.set()
        if result.finished:
            del self._request_ids[number]
            self._metrics.finished(result)


def _choice_seed(seed: int | None, number: int) -> int | None:
    """Return the seed of a choice. Choices differ from each other, but repeat if the request is repeated."""
    return None if seed is None else (seed + number + 2**63) % 2**64 - 2**63  # the sum stays within 64 bits


def _check_tokens(params: SamplingParams, vocab: int) -> None:
    """Raise ApiError if a parameter names a token outside the model's vocabulary."""
    for name, token in params.named_tokens:
        if token >= vocab:
            raise bad_request(name, f"{name} holds {token}; its token ids must be from 0 to {vocab - 1}")


def _queue_full(reason: str) -> ApiError:
    return ApiError(429, f"{reason}; try again later", code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})


def _dead_error(error: BaseException, status: int = 500) -> ApiError:
    return ApiError(status, str(error), code="engine_dead")
