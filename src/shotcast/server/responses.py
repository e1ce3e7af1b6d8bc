"""Responses in OpenAI's format: complete, and as the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from shotcast.engine.outputs import RequestOutput, TokenLogprob
from shotcast.server.answers import BEGIN, END, Answer, Thoughts
from shotcast.server.request_body import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from shotcast.server.tool_calls import ToolCall, ToolParser

if TYPE_CHECKING:
    from shotcast.engine.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""OpenAI's log-probability of an impossible token, since JSON has no minus infinity."""

_PROMPT_END = 8
"""The number of tokens at the end of a prompt that may include the marker that begins thoughts."""

_PIECE = 512
"""List items encoded at a time."""

B = TypeVar("B", bound=Body)


@dataclass(slots=True)
class _Sent:
    """The part of a choice already sent: characters of its text, its tokens, and the characters of those tokens."""

    text: int = 0
    tokens: int = 0
    offset: int = 0


class ApiResponse(ABC, Generic[B]):
    """The response to one request. Its choices are numbered ``prompt * n + i``."""

    PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, body: B, model: str, tokenizer: Tokenizer):
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._body = body
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._sent: dict[int, _Sent] = {}

    def prepare(self, prompts: Sequence[Sequence[int]]) -> None:
        """Do slow preparations for the first update, on the tokenizer's thread, given the tokens of the prompts."""

    def complete(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        choices = [self._complete_choice(number, output) for number, output in sorted(outputs.items())]
        return self._object(self.OBJECT, choices) | {"usage": self._usage(outputs)}

    def chunks(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the chunks for an update of a choice; none if it has no new text."""
        sent = self._sent.get(number, _Sent())
        text = output.text[sent.text :]
        logprobs = _text_logprobs(output)[sent.tokens :]
        if not (text or logprobs or output.finished):
            return []
        choices = self._opening(number) if number not in self._sent else []
        self._sent[number] = sent
        choice = self._chunk_choice(number, output, text, logprobs, sent)
        if choice.get("delta") != {} or logprobs or output.finished:
            choices.append(choice)
        sent.text += len(text)
        sent.tokens += len(logprobs)
        usage = {"usage": None} if self._body.include_usage else {}
        return [self._object(self.CHUNK, [choice]) | usage for choice in choices]

    def render(self, outputs: Mapping[int, RequestOutput]) -> bytes:
        """Return the JSON of :meth:`complete`, encoded choice by choice so that other threads get their turns."""
        whole = self.complete(outputs)
        choices = b",".join(_json_in_pieces(choice) for choice in whole.pop("choices"))
        return _json(whole)[:-1] + b',"choices":[' + choices + b"]}"

    def usage_chunk(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Return the last chunk of a stream, which contains the usage."""
        return self._object(self.CHUNK, []) | {"usage": self._usage(outputs)}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Return the token counts.

        A prompt counts once for all of its choices, and so do its cached tokens, as counted for the first choice.
        """
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
        """Return the choices of the chunks that precede the first text."""

    @abstractmethod
    def _complete_choice(self, number: int, output: RequestOutput) -> dict[str, Any]:
        """Return a choice of a complete response."""

    @abstractmethod
    def _chunk_choice(
        self, number: int, output: RequestOutput, text: str, logprobs: Sequence[TokenLogprob], sent: _Sent
    ) -> dict[str, Any]:
        """Return a choice of a chunk that adds ``text``."""


class CompletionResponse(ApiResponse[CompletionBody]):
    """The response of ``/v1/completions``."""

    PREFIX, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, model: str, tokenizer: Tokenizer):
        super().__init__(body, model, tokenizer)
        self._prompt_texts: dict[int, str] = {}

    def prepare(self, prompts: Sequence[Sequence[int]]) -> None:
        if self._body.echo:
            for number, tokens in enumerate(prompts):
                self._prompt_texts[number] = self._body.prompt_text(number, tokens, self._tokenizer)

    def _opening(self, number: int) -> list[dict[str, Any]]:
        if not self._body.echo:
            return []
        return [{"index": number, "text": self._prompt(number), "logprobs": None, "finish_reason": None}]

    def _complete_choice(self, number: int, output: RequestOutput) -> dict[str, Any]:
        text, entries = output.text, None
        if self._body.logprobs is not None:
            entries = self._logprobs(_text_logprobs(output), _Sent())
        if self._body.echo:
            prompt = self._prompt(number)
            text = prompt + text
            if entries is not None:
                entries = self._echoed_logprobs(output, prompt, entries)
        choice = {"index": number, "text": text, "logprobs": entries} | _finish_fields(output)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(output)
        return choice

    def _chunk_choice(
        self, number: int, output: RequestOutput, text: str, logprobs: Sequence[TokenLogprob], sent: _Sent
    ) -> dict[str, Any]:
        entries = None if self._body.logprobs is None else self._logprobs(logprobs, sent)
        return {"index": number, "text": text, "logprobs": entries} | _finish_fields(output)

    def _prompt(self, number: int) -> str:
        return self._prompt_texts[number // self._body.choices]

    def _echoed_logprobs(self, output: RequestOutput, prompt: str, later: dict[str, Any]) -> dict[str, Any]:
        """Return the log-probabilities of the prompt's tokens, followed by ``later``, the output's."""
        entries = [entry for entry in output.prompt_logprobs or () if entry is not None]
        first = output.prompt_tokens[0]
        sent = _Sent(offset=len(self._decode_token(first)))
        echoed = self._logprobs(entries, sent)
        offsets = [0, *echoed["text_offset"], *(len(prompt) + offset for offset in later["text_offset"])]
        return {
            "tokens": [self._tokenizer.decode_token(first, skip_special=False), *echoed["tokens"], *later["tokens"]],
            "token_logprobs": [None, *echoed["token_logprobs"], *later["token_logprobs"]],
            "top_logprobs": [None, *echoed["top_logprobs"], *later["top_logprobs"]],
            "text_offset": offsets,
        }

    def _prompt_logprobs(self, output: RequestOutput) -> list[dict[str, Any] | None]:
        """Return vLLM's list: the entry of each prompt token except the first, with the likeliest alternatives."""
        return [None if entry is None else self._prompt_entry(entry) for entry in output.prompt_logprobs or ()]

    def _prompt_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        ranked = ranked[: self._body.prompt_logprobs]
        return {
            str(token): {
                "logprob": _json_logprob(logprob),
                "rank": rank,
                "decoded_token": self._tokenizer.decode_token(token, skip_special=False),
            }
            for token, logprob, rank in ((entry.token, entry.logprob, entry.rank), *ranked)
        }

    def _decode_token(self, token: int) -> str:
        return self._tokenizer.decode_token(token, self._body.skip_special_tokens is not False)

    def _logprobs(self, entries: Sequence[TokenLogprob], sent: _Sent) -> dict[str, Any]:
        """Return OpenAI's four parallel lists. Offsets count the characters of earlier tokens, each decoded separately.

        Special tokens are shown by name, and have no characters if the text omits them.
        """
        tokens, offsets, alternatives = [], [], []
        for entry in entries:
            token = self._tokenizer.decode_token(entry.token, skip_special=False)
            top: dict[str, float] = {}
            # Tokens with the same text (parts of characters) share a key, which the likeliest gets.
            for other, logprob in (*entry.top[: self._body.logprobs], (entry.token, entry.logprob)):
                top.setdefault(self._tokenizer.decode_token(other, skip_special=False), _json_logprob(logprob))
            tokens.append(token)
            offsets.append(sent.offset)
            alternatives.append(top)
            sent.offset += len(self._decode_token(entry.token))
        return {
            "tokens": tokens,
            "token_logprobs": [_json_logprob(entry.logprob) for entry in entries],
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }


class ChatCompletionResponse(ApiResponse[ChatBody]):
    """The response of ``/v1/chat/completions``. Raises ApiError (status 400) if the model cannot call the request's
    tools.
    """

    PREFIX, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, model: str, tokenizer: Tokenizer):
        super().__init__(body, model, tokenizer)
        self._tool_format = body.tool_format(tokenizer)
        self._names = frozenset(function.name for function in body.functions)
        # an output by a grammar has no thoughts
        self._thinks = END in tokenizer.chat_template and body.grammar_source is None
        self._begun = False  # the prompt ends with the mark that begins thoughts
        self._answers: dict[int, Answer] = {}

    def prepare(self, prompts: Sequence[Sequence[int]]) -> None:
        if self._thinks:
            end = self._tokenizer.decode(prompts[0][-_PROMPT_END:], skip_special=False)
            self._begun = end.rstrip().endswith(BEGIN)

    def _opening(self, number: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _complete_choice(self, number: int, output: RequestOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        finish = _finish_fields(output)
        if (answer := self._new_answer()) is not None:
            answer.push(output.text, last=True)
            message["content"] = answer.content or (None if answer.calls else "")
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            if answer.calls:
                message["tool_calls"] = [_call(call) for call in answer.calls]
                finish |= _called(output)
        return {"index": number, "message": message, "logprobs": self._logprobs(_text_logprobs(output))} | finish

    def _chunk_choice(
        self, number: int, output: RequestOutput, text: str, logprobs: Sequence[TokenLogprob], sent: _Sent
    ) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text else {}
        finish = _finish_fields(output)
        if number not in self._answers and (made := self._new_answer()) is not None:
            self._answers[number] = made
        if (answer := self._answers.get(number)) is not None:
            delta = _delta(answer, text, output.finished)
            if answer.calls:
                finish |= _called(output)
        return {"index": number, "delta": delta, "logprobs": self._logprobs(logprobs)} | finish

    def _new_answer(self) -> Answer | None:
        """Return an object that splits an output into its parts; None if all of it is content."""
        if self._tool_format is None and not self._thinks:
            return None
        thoughts = Thoughts(self._begun) if self._thinks else None
        if self._tool_format is None:
            return Answer(thoughts, None)
        several = self._body.parallel_tool_calls is not False
        return Answer(thoughts, ToolParser(self._tool_format, self._names, several))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = [
            self._token_logprob(entry.token, entry.logprob)
            | {"top_logprobs": [self._token_logprob(token, logprob) for token, logprob in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode_token(token, skip_special=False)
        # A part of a character decodes to the replacement character, whose bytes are not the token's.
        return {
            "token": text,
            "logprob": _json_logprob(logprob),
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }


def _delta(answer: Answer, text: str, last: bool) -> dict[str, Any]:
    """Return what the next piece of an output adds to thoughts, content and calls."""
    reasoning, content = len(answer.reasoning), len(answer.content)
    calls = [len(call.arguments) for call in answer.calls]
    answer.push(text, last)
    delta: dict[str, Any] = {}
    if len(answer.reasoning) > reasoning:
        delta["reasoning_content"] = answer.reasoning[reasoning:]
    if len(answer.content) > content:
        delta["content"] = answer.content[content:]
    grown = []
    for index, call in enumerate(answer.calls):
        if index >= len(calls):
            grown.append({"index": index} | _call(call))
        elif len(call.arguments) > calls[index]:
            grown.append({"index": index, "function": {"arguments": call.arguments[calls[index] :]}})
    return delta | ({"tool_calls": grown} if grown else {})


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _called(output: RequestOutput) -> dict[str, Any]:
    """Return the finish reason of an output with calls, unless the output ended for another reason."""
    return {"finish_reason": "tool_calls"} if output.finish_reason == "stop" else {}


def tokenized(body: TokenizeBody, tokenizer: Tokenizer, max_model_len: int) -> bytes:
    """Return the JSON response of ``/tokenize``. Raises ConfigError if the template rejects the messages."""
    tokens = body.tokenize(tokenizer)
    texts = [tokenizer.decode_token(token, skip_special=False) for token in tokens] if body.return_token_strs else None
    whole = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": texts}
    return _json_in_pieces(whole)


def detokenized(body: DetokenizeBody, tokenizer: Tokenizer) -> bytes:
    return _json({"prompt": tokenizer.decode(body.tokens, skip_special=False)})


def _json_in_pieces(data: object) -> bytes:
    """Encode the long lists of an object piece by piece, so that other threads get their turns."""
    if isinstance(data, dict):
        return b"{" + b",".join(_json(key) + b":" + _json_in_pieces(value) for key, value in data.items()) + b"}"
    if not isinstance(data, list):
        return _json(data)
    pieces = [_json(data[start : start + _PIECE])[1:-1] for start in range(0, len(data), _PIECE)]
    return b"[" + b",".join(pieces) + b"]"


def _json(data: object) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _text_logprobs(output: RequestOutput) -> Sequence[TokenLogprob]:
    """Return the log-probabilities of the tokens in the text, without the token that ended it."""
    entries = output.logprobs or []
    ended_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    return entries[:-1] if ended_by_token else entries


def _finish_fields(output: RequestOutput) -> dict[str, Any]:
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _json_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
