"""The bodies of requests: what they may ask for, checked and brought into the engine's terms."""

from __future__ import annotations

import reprlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from shotcast.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from shotcast.errors import ConfigError
from shotcast.server.api_error import ApiError
from shotcast.server.engine_protocol import Tokenizer

MAX_STOP = 4
"""Stop strings of a request."""

ROLES = ("system", "user", "assistant")

NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameters of OpenAI's that nothing here does, with the values that ask for nothing (besides null)."""


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def _optional(accepted: str, **limits: Any) -> Any:
    return Field(default=None, description=accepted, **limits)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Body(_Strict):
    """What both kinds of request share. A description says what the parameter takes, and completes an error message;
    the ranges of sampling parameters are those of :class:`SamplingParams`."""

    PROMPT: ClassVar[str]
    """The parameter that holds the prompt."""

    model: str = Field(description="the name of a model")
    max_tokens: int | None = _optional("a whole number from 1 up")
    n: int | None = _optional("a whole number from 1 to 128", ge=1, le=128)
    temperature: float | None = _optional("a number from 0 up")
    top_p: float | None = _optional("a number above 0, at most 1")
    top_k: int | None = _optional("a whole number of at most 31 bits, 0 or -1 for all tokens", ge=-1, lt=1 << 31)
    min_p: float | None = _optional("a number from 0 to 1")
    presence_penalty: float | None = _optional("a number from -2 to 2")
    frequency_penalty: float | None = _optional("a number from -2 to 2")
    seed: int | None = _optional("a whole number of 64 bits")
    stop: str | list[str] | None = _optional(f"a string or a list of at most {MAX_STOP} strings")
    stop_token_ids: list[int] | None = _optional("a list of token ids")
    ignore_eos: bool | None = _optional("true or false")
    stream: bool | None = _optional("true or false")
    stream_options: StreamOptions | None = _optional('an object that may hold "include_usage": true or false')
    # Who asks, for whoever keeps records; nothing here depends on it.
    user: str | None = _optional("a string")
    safety_identifier: str | None = _optional("a string")
    prompt_cache_key: str | None = _optional("a string")

    @model_validator(mode="after")
    def _related(self) -> Body:
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP:
            raise bad("stop", f"stop is at most {MAX_STOP} strings, not {len(self.stop)}")
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", "stream_options goes with stream=true")
        return self

    @property
    def choices(self) -> int:
        """Outputs for each prompt."""
        return self.n or 1

    @property
    def prompts(self) -> int:
        return 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The tokens that were asked for, after the parameter that says so."""
        return "max_tokens", self.max_tokens

    @property
    @abstractmethod
    def alternatives(self) -> tuple[str, int | None]:
        """The log-probabilities that were asked for at each token, after the parameter that says so."""

    def sampling(self) -> SamplingParams:
        """How to draw tokens; how many to draw at most and the seed of each choice are the caller's to fill in.

        Raises:
            ApiError: 400 that names the parameter that is out of its range.
        """
        same = {field.name for field in fields(SamplingParams)} & set(type(self).model_fields)
        given = {name: (name, getattr(self, name)) for name in same - {"max_tokens", "logprobs"}}
        given["top_k"] = ("top_k", max(self.top_k or 0, 0))
        given["max_tokens"] = self.output_limit
        given["logprobs"] = self.alternatives
        values = {name: value for name, (_, value) in given.items() if value is not None}
        for name, value in values.items():
            try:
                SamplingParams(**{name: value})
            except ConfigError as error:
                asked = given[name][0]
                raise bad(asked, str(error).replace(name, asked, 1)) from error
        return SamplingParams(**values)

    @abstractmethod
    def tokenize(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of each prompt."""


class CompletionBody(Body):
    """``POST /v1/completions``."""

    PROMPT = "prompt"

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="a string, a list of strings, a list of token ids or a list of such lists"
    )
    best_of: int | None = _optional("what n is")
    echo: bool | None = _optional("true or false")
    logprobs: int | None = _optional(f"a whole number from 0 to {MAX_LOGPROBS}")

    @model_validator(mode="after")
    def _related_to_the_prompt(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.choices:
            raise bad("best_of", f"best_of is what n is ({self.choices}), not {self.best_of}: all outputs are returned")
        if self.echo and self.logprobs is not None:
            raise bad("echo", "echo does not go with logprobs: there are none of the prompt")
        if not self._prompts or not all(self._prompts):
            raise bad("prompt", "prompt is empty")
        if not all(isinstance(one, str) or min(one) >= 0 for one in self._prompts):
            raise bad("prompt", "prompt holds a token id below 0")
        return self

    @property
    def _prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    @property
    def prompts(self) -> int:
        return len(self._prompts)

    @property
    def alternatives(self) -> tuple[str, int | None]:
        return "logprobs", self.logprobs

    def tokenize(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in self._prompts]

    def prompt_text(self, number: int, tokenizer: Tokenizer) -> str:
        """A prompt as it was sent; token ids as text."""
        prompt = self._prompts[number]
        return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    PROMPT = "messages"

    messages: list[dict[str, Any]] = Field(description="a list of objects with role and content", min_length=1)
    max_completion_tokens: int | None = _optional("a whole number from 1 up")
    logprobs: bool | None = _optional("true or false")
    top_logprobs: int | None = _optional(f"a whole number from 0 to {MAX_LOGPROBS}")

    @field_validator("messages")
    @classmethod
    def _messages(cls, messages: list[dict[str, Any]]) -> list[dict[str, str]]:
        return [_message(f"messages[{number}]", message) for number, message in enumerate(messages)]

    @model_validator(mode="after")
    def _related_to_the_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs", "top_logprobs goes with logprobs=true")
        if None not in (old_new := (self.max_tokens, self.max_completion_tokens)) and old_new[0] != old_new[1]:
            raise bad("max_tokens", "max_tokens and max_completion_tokens are the same limit, and differ")
        return self

    @property
    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def alternatives(self) -> tuple[str, int | None]:
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None

    def tokenize(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [tokenizer.apply_chat_template(self.messages)]


def _message(place: str, message: dict[str, Any]) -> dict[str, str]:
    """Role and content, the parts of the content put together.

    Clients send back the answers they got, with fields of no content: null and empty lists are passed over.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise bad("messages", f"{place}.role is {', '.join(ROLES)}, not {reprlib.repr(role)}")
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, []):
            raise bad("messages", f"{place}.{name} is not supported")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise bad("messages", f"{place}.content is a string or a list of text parts, not {reprlib.repr(content)}")
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            accepted = '{"type": "text", "text": ...}'
            raise bad("messages", f"{place}.content[{number}] is {accepted}, not {reprlib.repr(part)}")
        texts.append(text)
    return {"role": role, "content": "".join(texts)}


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """The body of a request.

    Raises:
        ApiError: 400 that says what is wrong with it, and names the parameter.
    """
    try:
        said = from_json(raw)
    except ValueError as error:
        raise bad(None, f"the body is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise bad(None, f"the body is a JSON object, not {reprlib.repr(said)}")
    for name in said.keys() & NOT_SERVED.keys():
        value = said.pop(name)
        if value is not None and value not in NOT_SERVED[name]:
            raise bad(name, f"{name} is not supported", "unsupported_parameter")
    try:
        return kind.model_validate(said)
    except ValidationError as error:
        raise _explained(kind, error) from error


def _explained(kind: type[Body], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    path = ".".join(map(str, first["loc"]))
    param = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return bad(path, f"there is no parameter {path}", "unknown_parameter")
    accepted = kind.model_fields[param].description
    if first["type"] == "missing":
        return bad(param, f"{param} is missing: {accepted}", "missing_parameter")
    return bad(param, f"{param} is {accepted} (at {path}: {reprlib.repr(first['input'])})")
