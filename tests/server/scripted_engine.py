"""An engine with known tokens, for tests of the HTTP server.

The token of a character is its code point, so prompts have as many tokens as characters. The output of a prompt is the
alphabet from the seed's letter on ("abc...", with seed 1 "bcd..."), and ends after ``length`` letters.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from shotcast.engine.outputs import EngineStats, FinishReason, OutputCallback, RequestOutput, TokenLogprob
from shotcast.engine.requests import CheckedPrompt
from shotcast.engine.sampling_params import SamplingParams, checked_token_ids
from shotcast.errors import ConfigError, EngineDead

END = 0
HALF, OTHER_HALF = 1, 2
"""Tokens that are parts of one character."""

NOTHING = "~"
"""A character without a token."""

BEGIN = 4
"""The special token before a text that starts with "begin"."""

NEVER = 3
"""An impossible token: its probability is 0."""


class ScriptedTokenizer:
    def encode(self, text: str, add_special: bool = True) -> list[int]:
        tokens = [ord(character) for character in text if character != NOTHING]
        return [BEGIN, *tokens] if add_special and text.startswith("begin") else tokens

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        texts = {HALF: "\ufffd", OTHER_HALF: "\ufffd", BEGIN: "" if skip_special else "<begin>"}
        return "".join(texts[token] if token in texts else chr(token) for token in ids if token <= 0x10FFFF)

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        return self.decode([token], skip_special)

    def check_template_variables(self, names: Iterable[str]) -> None:
        if "chat_template" in names:
            raise ConfigError("chat_template is reserved")

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, str]],
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        if messages[-1]["role"] != "user":
            raise ConfigError("the template wants the user's word last")
        texts = [f"[{name}={value}]" for name, value in (variables or {}).items()]
        texts += [f"<{message['role']}>{message['content']}" for message in messages]
        return self.encode("".join(texts if add_generation_prompt else [*texts, "."]))


class ScriptedEngine:
    """A scripted engine that records its requests.

    Attributes:
        length: letters of an output before its end token.
        delay_s: seconds between tokens.
        hold_after: outputs stop growing at this many tokens until ``let_go`` is called.
        textless: so many first tokens of an output have no text.
        dies_at: the engine dies when an output reaches this many tokens.
        fault: the error that every request raises at ``fault_at`` tokens.
        end_reason, end_error: the finish reason and the error of an output that ends by itself.
        started, aborted, finished: ids of requests.
    """

    model_name = "letters"
    sampling_defaults: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.tokenizer = ScriptedTokenizer()
        self.max_model_len = 200
        self.length = 5
        self.delay_s = 0.0
        self.hold_after: int | None = None
        self.textless = 0
        self.dies_at: int | None = None
        self.fault: Exception | None = None
        self.fault_at = 0
        self.end_reason: FinishReason = "stop"
        self.end_error = ""
        self.params: list[SamplingParams] = []
        self._prompts: list[tuple[int, ...]] = []
        self.started: list[str] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.running = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.most_running = 0
        self.closed = False
        self.dead: BaseException | None = None
        self._died = asyncio.Event()
        self._let_go = asyncio.Event()

    @property
    def prompts(self) -> list[list[int]]:
        return list(map(list, self._prompts))

    def let_go(self) -> None:
        self._let_go.set()

    def die(self) -> None:
        self.dead = EngineDead("rank 1 was killed")
        self._died.set()
        self._let_go.set()

    def check_prompt(self, prompt: Sequence[int]) -> CheckedPrompt:
        tokens = checked_token_ids(prompt, "the prompt")
        if any(token > 0x10FFFF or 0xD800 <= token < 0xE000 for token in tokens):
            raise ConfigError("the prompt holds a token that is no character")
        return CheckedPrompt(tokens)

    def start(self, prompt: CheckedPrompt, params: SamplingParams, request_id: str, on_output: OutputCallback) -> None:
        self.started.append(request_id)
        self.params.append(params)
        self._prompts.append(prompt.tokens)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self._tasks[request_id] = asyncio.create_task(self._run(prompt.tokens, params, request_id, on_output))

    def abort(self, request_id: str) -> None:
        if request_id in self._tasks:
            self._end(request_id).cancel()
            self.aborted.append(request_id)

    def _end(self, request_id: str) -> asyncio.Task[None]:
        self.running -= 1
        return self._tasks.pop(request_id)

    async def _run(
        self, prompt: tuple[int, ...], params: SamplingParams, request_id: str, on_output: OutputCallback
    ) -> None:
        try:
            async for output in self._letters(prompt, params, request_id):
                if output.finished:
                    self.finished.append(request_id)
                    self._end(request_id)
                on_output(output)
        except Exception as error:
            self._end(request_id)
            on_output(error)

    async def _letters(
        self, prompt: tuple[int, ...], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        output = RequestOutput(request_id, prompt, cached_tokens=len(prompt) // 2)
        if params.logprobs is not None:
            output.logprobs = []
        if params.prompt_logprobs is not None:
            capitals = ((ord("A") + place, -6.0 - place) for place in range(17))
            top = ((HALF, -0.25), (NEVER, -math.inf), (OTHER_HALF, -math.inf), *capitals)[: params.prompt_logprobs]
            entries = (TokenLogprob(token, -float(place), 2, top) for place, token in enumerate(prompt) if place)
            output.prompt_logprobs = (None, *entries)
        if not params.max_tokens:
            output.finish_reason = "length"
            yield output
        while not output.finished:
            await asyncio.sleep(self.delay_s)
            if self.hold_after == len(output.tokens):
                await self._let_go.wait()
            if self.fault is not None and self.fault_at == len(output.tokens):
                raise self.fault
            if self.dies_at == len(output.tokens):
                self.die()
            if self.dead is not None:
                raise self.dead
            number = len(output.tokens)
            ends = number == self.length and not params.ignore_eos
            token = END if ends else ord("a") + ((params.seed or 0) + number) % 26
            output.tokens.append(token)
            if output.logprobs is not None:
                ranked = ((token, -0.5), (HALF, -1.5), (NEVER, -math.inf), (OTHER_HALF, -math.inf))
                output.logprobs.append(TokenLogprob(token, -0.5, 1, ranked[: params.logprobs]))
            output.time_s = 0.25 + 0.125 * number
            output.times_s.append(output.time_s)
            if ends:
                output.finish_reason, output.error = self.end_reason, self.end_error
            elif token in params.stop_token_ids:
                output.finish_reason, output.stop_reason = "stop", token
            elif number >= self.textless:
                output.text += chr(token)
                for stop in params.stop:
                    if stop in output.text:
                        output.text = output.text[: output.text.index(stop)]
                        output.finish_reason, output.stop_reason = "stop", stop
                if len(output.tokens) == params.max_tokens and not output.finished:
                    output.finish_reason = "length"
            yield output

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.running,
            waiting=3,
            kv_blocks=8,
            kv_blocks_used=2,
            prompt_tokens=1000,
            cached_tokens=400,
            output_tokens=500,
            preemptions=7,
            steps=60,
            step_s=1.5,
            communication_s=0.25,
        )

    async def wait_dead(self) -> BaseException:
        await self._died.wait()
        assert self.dead is not None
        return self.dead

    async def close(self) -> None:
        self.closed = True
