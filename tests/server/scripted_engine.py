"""An engine with known tokens, for tests of the HTTP server.

The token of a character is its code point, so prompts have as many tokens as characters. The output of a prompt is the
alphabet from the seed's letter on ("abc...", with seed 1 "bcd..."), and ends after ``length`` letters.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from shotcast.engine.grammar import Grammar, GrammarChecker, GrammarCompiler, Vocabulary
from shotcast.engine.outputs import EngineStats, FinishReason, OutputCallback, RequestOutput, TokenLogprob
from shotcast.engine.requests import CheckedPrompt
from shotcast.engine.sampling_params import SamplingParams, checked_token_ids
from shotcast.engine.token_constraints import unpack
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


def is_character(token: int) -> bool:
    return token <= 0x10FFFF and not 0xD800 <= token < 0xE000


class ScriptedTokenizer:
    special_tokens: Mapping[str, int] = {"<begin>": BEGIN}

    def __init__(self) -> None:
        self.chat_template = ""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        tokens = [ord(character) for character in text if character != NOTHING]
        return [BEGIN, *tokens] if add_special and text.startswith("begin") else tokens

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        texts = {HALF: "\ufffd", OTHER_HALF: "\ufffd", BEGIN: "" if skip_special else "<begin>"}
        return "".join(texts[token] if token in texts else chr(token) for token in ids if is_character(token))

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
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        if messages[-1]["role"] not in ("user", "tool"):
            raise ConfigError("the template wants the user's word last")
        texts = [f"[{name}={value}]" for name, value in (variables or {}).items()]
        texts += [f"({tool['function']['name']})" for tool in tools or ()]
        for message in messages:
            rest = "".join(f"{{{message[name]}}}" for name in ("tool_calls", "tool_call_id") if name in message)
            texts.append(f"<{message['role']}>{message['content']}{rest}")
        return self.encode("".join(texts if add_generation_prompt else [*texts, "."]))


@functools.cache
def vocabulary() -> Vocabulary:
    """Return the printable characters of ASCII and the end of a line, as tokens of grammars."""
    letters = {chr(code): code for code in range(33, 127)} | {"\u0120": 32, "\u010a": 10}
    names = {f"<{token}>": token for token in range(128) if token not in letters.values()}
    backend = Backend(models.BPE(letters | names, []))
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Vocabulary(backend.to_str(), 128, (END,))


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary())


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
        answer: the text of all outputs, instead of letters, with ``piece`` characters a token.
        started, aborted, finished: ids of requests.
    """

    model_name = "letters"
    vocab = 0x110000
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
        self.answer: str | None = None
        self.piece = 1
        self._checker = GrammarChecker(vocabulary())
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
        if not all(map(is_character, tokens)):
            raise ConfigError("the prompt holds a token that is no character")
        return CheckedPrompt(tokens)

    def check_grammar(self, grammar: Grammar) -> None:
        self._checker.check(grammar)

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
        if params.grammar is not None or self.answer is not None:
            text = self.answer if params.grammar is None else await asyncio.to_thread(self._sentence, params)
            for spoken in self._spoken(output, text or "", params):
                await asyncio.sleep(self.delay_s)
                yield spoken
            return
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

    def _sentence(self, params: SamplingParams, closing_after: int = 40) -> str:
        """Return a text of the grammar: random, but as short as brackets let it be after some characters."""
        assert params.grammar is not None
        chance, (matcher, _) = random.Random(params.seed), compiler().matcher(params.grammar)
        text = ""
        while True:
            mask = np.zeros(4, np.int32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(unpack(mask[None], 128)[0]).tolist()
            if not allowed or len(text) > 1000:
                return text
            closing = [token for token in allowed if token == END or chr(token) in '"}]']
            token = chance.choice(closing if closing and len(text) > closing_after else allowed)
            if token == END:
                return text
            assert matcher.consume_token(token)
            text += chr(token)

    def _spoken(self, output: RequestOutput, text: str, params: SamplingParams) -> Iterator[RequestOutput]:
        pieces = [text[start : start + self.piece] for start in range(0, len(text), self.piece)]
        for number, piece in enumerate(pieces[: params.max_tokens]):
            output.text += piece
            output.tokens.append(ord(piece[0]))
            if output.logprobs is not None:
                output.logprobs.append(TokenLogprob(output.tokens[-1], -0.5, 1, ()))
            output.times_s.append(0.25 * number)
            if number + 1 == params.max_tokens:
                output.finish_reason = "length"
            yield output
        if not output.finished:
            output.tokens.append(END)
            if output.logprobs is not None:
                output.logprobs.append(TokenLogprob(END, -0.5, 1, ()))
            output.times_s.append(0.25)
            output.finish_reason = "stop"
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
            proposed_tokens=90,
            accepted_tokens=80,
            steps=60,
            step_s=1.5,
            communication_s=0.25,
        )

    async def wait_dead(self) -> BaseException:
        await self._died.wait()
        assert self.dead is not None
        return self.dead

    async def close(self) -> None:
        self._checker.close()
        self.closed = True
