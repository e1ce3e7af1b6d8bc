"""Outputs in OpenAI's shapes: whole, and as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from shotcast.engine.outputs import RequestOutput, TokenLogprob
from shotcast.server.engine_protocol import Tokenizer
from shotcast.server.request_body import Body, ChatBody, CompletionBody

LEAST_LOGPROB = -9999.0
"""What OpenAI says of a token that cannot come: JSON has no minus infinity."""

B = TypeVar("B", bound=Body)


@dataclass(slots=True)
class _Told:
    """How much of a choice the chunks have said: characters of its text, tokens, and characters of those tokens."""

    text: int = 0
    tokens: int = 0
    offset: int = 0


class Answer(ABC, Generic[B]):
    """The answer to one request. Choices come as updates, numbered ``prompt * n + i``."""

    PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, body: B, model: str, tokenizer: Tokenizer):
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._body = body
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._told: dict[int, _Told] = {}

    def whole(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        choices = [self._whole_choice(number, output) for number, output in sorted(outputs.items())]
        return self._object(self.OBJECT, choices) | {"usage": self._usage(outputs)}

    def chunks(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What to say about an update; nothing, if it has no text yet."""
        choices = []
        told = self._told.get(number)
        if told is None:
            told = self._told[number] = _Told()
            choices += self._opening(number)
        text = output.text[told.text :]
        logprobs = _of_text(output)[told.tokens :]
        if text or logprobs or output.finished:
            choices.append(self._chunk_choice(number, output, text, logprobs, told))
            told.text += len(text)
            told.tokens += len(logprobs)
        usage = {"usage": None} if self._body.include_usage else {}
        return [self._object(self.CHUNK, [choice]) | usage for choice in choices]

    def usage_chunk(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        return self._object(self.CHUNK, []) | {"usage": self._usage(outputs)}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Tokens. A prompt counts once, whatever the number of its choices; so do its cached tokens, of the first."""
        first = [outputs[number] for number in range(0, len(outputs), self._body.choices)]
        prompt = sum(len(output.prompt_tokens) for output in first)
        completion = sum(len(output.tokens) for output in outputs.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in first)},
        }

    @abstractmethod
    def _opening(self, number: int) -> list[dict[str, Any]]:
        """Choices of chunks that go before the first text."""

    @abstractmethod
    def _whole_choice(self, number: int, output: RequestOutput) -> dict[str, Any]:
        """A choice of an answer in one piece."""

    @abstractmethod
    def _chunk_choice(
        self, number: int, output: RequestOutput, text: str, logprobs: Sequence[TokenLogprob], told: _Told
    ) -> dict[str, Any]:
        """A choice of a chunk, that says ``text``."""


class CompletionResponse(Answer[CompletionBody]):
    PREFIX, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def _opening(self, number: int) -> list[dict[str, Any]]:
        if not self._body.echo:
            return []
        return [{"index": number, "text": self._prompt(number), "logprobs": None, "finish_reason": None}]

    def _whole_choice(self, number: int, output: RequestOutput) -> dict[str, Any]:
        text = self._prompt(number) + output.text if self._body.echo else output.text
        return self._chunk_choice(number, output, text, _of_text(output), _Told())

    def _chunk_choice(
        self, number: int, output: RequestOutput, text: str, logprobs: Sequence[TokenLogprob], told: _Told
    ) -> dict[str, Any]:
        said = None if self._body.logprobs is None else self._logprobs(logprobs, told)
        return {"index": number, "text": text, "logprobs": said} | _ending(output)

    def _prompt(self, number: int) -> str:
        return self._body.prompt_text(number // self._body.choices, self._tokenizer)

    def _logprobs(self, entries: Sequence[TokenLogprob], told: _Told) -> dict[str, Any]:
        """Four lists side by side; offsets count the characters of the tokens before, each decoded alone.

        Special tokens have names, and no characters.
        """
        tokens, offsets, alternatives = [], [], []
        for entry in entries:
            token = self._tokenizer.decode_token(entry.token, skip_special=False)
            top: dict[str, float] = {}
            # Tokens that look alike (parts of characters) share a key: the likeliest keeps it.
            for other, logprob in (*entry.top, (entry.token, entry.logprob)):
                top.setdefault(self._tokenizer.decode_token(other, skip_special=False), _finite(logprob))
            tokens.append(token)
            offsets.append(told.offset)
            alternatives.append(top)
            told.offset += len(self._tokenizer.decode_token(entry.token))
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }


class ChatCompletionResponse(Answer[ChatBody]):
    PREFIX, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _opening(self, number: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _whole_choice(self, number: int, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": number, "message": message, "logprobs": self._logprobs(_of_text(output))} | _ending(output)

    def _chunk_choice(
        self, number: int, output: RequestOutput, text: str, logprobs: Sequence[TokenLogprob], told: _Told
    ) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": number, "delta": delta, "logprobs": self._logprobs(logprobs)} | _ending(output)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = [
            self._one(entry.token, entry.logprob)
            | {"top_logprobs": [self._one(token, logprob) for token, logprob in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode_token(token, skip_special=False)
        # A part of a character decodes to the sign for what is none, whose bytes are not the token's.
        return {"token": text, "logprob": _finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def _of_text(output: RequestOutput) -> Sequence[TokenLogprob]:
    """Log-probabilities of the tokens that make up the text: without the token that ended it."""
    entries = output.logprobs or []
    ended_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    return entries[:-1] if ended_by_token else entries


def _ending(output: RequestOutput) -> dict[str, Any]:
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
