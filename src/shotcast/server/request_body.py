"""Request bodies: their parameters, validated and converted to the engine's."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from shotcast.engine.grammar import Grammar, styled
from shotcast.engine.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, SamplingParams
from shotcast.errors import ConfigError, similar
from shotcast.server.api_error import ApiError
from shotcast.server.tool_calls import Function, ToolFormat, calls_grammar, find_format

if TYPE_CHECKING:
    from shotcast.engine.tokenizer import Tokenizer

MAX_STOP = 4
"""The largest number of stop strings of a request."""

MAX_STOP_CHARACTERS = 256
"""The longest stop string: each token is compared with the prefixes of all stop strings."""

MAX_PARTS = 65_536
"""The maximum number of lists, objects and keys in a body: parsing holds the interpreter lock, and these take the most
time."""

_MAX_SHOWN = 64
"""The number of characters of a value or name that an error message shows."""

MAX_TOOLS = 128
"""The largest number of tools of a request."""

MAX_ALLOWED_TOKENS = 65_536
"""The largest number of allowed tokens of a request."""

ROLES = ("system", "developer", "user", "assistant", "tool")

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
"""The keys of ``structured_outputs``; a request may use one."""

_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
"""Parameters of OpenAI's API that are not supported, or only for chats, with the values (besides null) that are
accepted because they request nothing."""


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return an error for a request whose parameter ``param`` is wrong."""
    return ApiError(400, message, param=param, code=code)


def shown(value: object) -> str:
    """Format a JSON value of any size for an error message."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}...")
    if isinstance(value, dict):
        return "an object"
    return f"a list of length {len(value)}" if isinstance(value, list) else repr(value)[:_MAX_SHOWN]


def _wrong(body: type[BaseModel], param: str, path: str, value: object) -> ApiError:
    """Return an error for the first value that ``param`` does not accept."""
    return bad_request(param, f"{param} must be {body.model_fields[param].description} (at {path}: {shown(value)})")


def _must_be(param: str, path: str, accepted: str, value: object) -> ApiError:
    """Return an error for the value at ``path`` within ``param``."""
    return bad_request(param, f"{path} must be {accepted}, not {shown(value)}")


def _optional(accepted: str, **limits: Any) -> Any:
    return Field(default=None, description=accepted, **limits)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class RequestBody(_Strict):
    """The parameter that all requests share, and the check of ``messages``, which several have.

    The description of a parameter says which values it accepts, and completes the error message "... must be".
    """

    model: str | None = _optional("the name of a model")

    @field_validator("messages", mode="plain", check_fields=False)
    @classmethod
    def _check_messages(cls, messages: object) -> list[dict[str, Any]]:
        if not isinstance(messages, list) or not messages:
            raise _wrong(cls, "messages", "messages", messages)
        texts = []
        for number, message in enumerate(messages):
            if not isinstance(message, dict):
                raise _wrong(cls, "messages", f"messages.{number}", message)
            texts.append(_message(f"messages[{number}]", message))
        return texts


class Body(RequestBody):
    """The parameters shared by both kinds of requests for an output.

    Sampling parameters have the ranges of :class:`SamplingParams`.
    """

    PROMPT: ClassVar[str]
    """The parameter that holds the prompt."""

    model: str = Field(description="the name of a model")
    max_tokens: int | None = _optional("a whole number of at least 1", ge=1)
    n: int | None = _optional("a whole number from 1 to 128", ge=1, le=128)
    temperature: float | None = _optional("a number of at least 0")
    top_p: float | None = _optional("a number above 0, at most 1")
    top_k: int | None = _optional("a whole number of at most 31 bits, 0 or -1 for all tokens", ge=-1, lt=1 << 31)
    min_p: float | None = _optional("a number from 0 to 1")
    presence_penalty: float | None = _optional("a number from -2 to 2")
    frequency_penalty: float | None = _optional("a number from -2 to 2")
    repetition_penalty: float | None = _optional("a number from 0.001 to 10")
    seed: int | None = _optional("a whole number of 64 bits")
    stop: str | list[str] | None = _optional(
        f"a string or a list of at most {MAX_STOP} strings, each of at most {MAX_STOP_CHARACTERS} characters"
    )
    stop_token_ids: list[int] | None = _optional(
        f"a list of at most {MAX_STOP_TOKEN_IDS} token ids", max_length=MAX_STOP_TOKEN_IDS, fail_fast=True
    )
    min_tokens: int | None = _optional("a whole number of at least 0", ge=0)
    logit_bias: dict[str, float] | None = _optional(
        f"an object of at most {MAX_LOGIT_BIAS} token ids, each with a number from -100 to 100"
    )
    allowed_token_ids: list[int] | None = _optional(
        f"a list of 1 to {MAX_ALLOWED_TOKENS} token ids", min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True
    )
    response_format: dict[str, Any] | None = _optional(
        'an object with the type "text", "json_object" or "json_schema", and a json_schema with a schema'
    )
    structured_outputs: dict[str, Any] | None = _optional(f"an object with one of {', '.join(CONSTRAINTS)}")
    ignore_eos: bool | None = _optional("true or false")
    skip_special_tokens: bool | None = _optional("true or false")
    truncate_prompt_tokens: int | None = _optional("a whole number of at least 1, or -1 for what fits", ge=-1)
    stream: bool | None = _optional("true or false")
    stream_options: StreamOptions | None = _optional('an object that may hold "include_usage": true or false')
    # OpenAI's service has uses for these; nothing here depends on them.
    metadata: dict[str, Any] | None = _optional("an object")
    prompt_cache_key: str | None = _optional("a string")
    prompt_cache_retention: str | None = _optional("a string")
    reasoning_effort: str | None = _optional("a string")
    safety_identifier: str | None = _optional("a string")
    service_tier: str | None = _optional("a string")
    store: bool | None = _optional("true or false")
    user: str | None = _optional("a string")
    verbosity: str | None = _optional("a string")

    # Other lists and objects are validated by hand: pydantic goes on after an error, and reports each item of a list
    # once for each type that it might have had.

    @field_validator("stop", mode="plain")
    @classmethod
    def _check_stop(cls, stop: object) -> object:
        strings = stop if isinstance(stop, list) else [stop]
        if len(strings) > MAX_STOP:
            raise bad_request("stop", f"stop must be at most {MAX_STOP} strings, not {len(strings)}")
        for string in strings:
            if not isinstance(string, str) or len(string) > MAX_STOP_CHARACTERS:
                raise _wrong(cls, "stop", "stop", string)
        return stop

    @field_validator("logit_bias", mode="plain")
    @classmethod
    def _check_logit_bias(cls, bias: object) -> object:
        if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIAS:
            raise _wrong(cls, "logit_bias", "logit_bias", bias)
        for token, value in bias.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise _wrong(cls, "logit_bias", "logit_bias", token)
            if type(value) not in (int, float) or not -100 <= value <= 100:
                raise _wrong(cls, "logit_bias", f"logit_bias.{token}", value)
        return bias

    @field_validator("response_format", mode="plain")
    @classmethod
    def _check_response_format(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("type") not in ("text", "json_object", "json_schema"):
            kind = given.get("type") if isinstance(given, dict) else given
            raise _wrong(cls, "response_format", "response_format", kind)
        schema = given.get("json_schema")
        _require_known(given, ("type", "json_schema"), "response_format.")
        if given["type"] != "json_schema":
            return {"type": given["type"]}
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise _wrong(cls, "response_format", "response_format.json_schema", schema)
        _require_known(schema, ("name", "description", "schema", "strict"), "response_format.json_schema.")
        if not isinstance(schema.get("strict"), bool | None):
            raise _wrong(cls, "response_format", "response_format.json_schema.strict", schema["strict"])
        return given

    @field_validator("structured_outputs", mode="plain")
    @classmethod
    def _check_structured_outputs(cls, given: object) -> object:
        if not isinstance(given, dict):
            raise _wrong(cls, "structured_outputs", "structured_outputs", given)
        _require_known(given, CONSTRAINTS, "structured_outputs.")
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise bad_request("structured_outputs", f"structured_outputs must hold one of {', '.join(CONSTRAINTS)}")
        ((name, value),) = given.items()
        if name == "choice":
            right = isinstance(value, list) and bool(value) and all(isinstance(one, str) and one for one in value)
            accepted = "a list of strings, none of them empty"
        elif name == "json_object":
            right, accepted = value is True, "true"
        elif name == "json":
            if isinstance(value, str):
                value = _json_object(value)
            right, accepted = isinstance(value, dict), "a JSON schema, as an object or a string"
        else:
            right, accepted = isinstance(value, str) and bool(value), "a string that is not empty"
        if not right:
            raise _must_be("structured_outputs", f"structured_outputs.{name}", accepted, value)
        return {name: value}

    @field_validator("stream_options", mode="before")
    @classmethod
    def _check_stream_options(cls, options: object) -> object:
        if isinstance(options, dict):
            _require_known(options, StreamOptions.model_fields, "stream_options.")
        return options

    @model_validator(mode="after")
    def _check_combinations(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "stream_options needs stream=true")
        if self.truncate_prompt_tokens == 0:
            raise _wrong(type(self), "truncate_prompt_tokens", "truncate_prompt_tokens", 0)
        limit, most = self.output_limit
        if most and self.min_tokens is not None and self.min_tokens > most:
            raise _must_be("min_tokens", "min_tokens", f"at most {limit} ({most})", self.min_tokens)
        constraint = self.grammar_source
        if self.structured_outputs is not None and constraint != "structured_outputs":
            raise bad_request("structured_outputs", f"structured_outputs cannot be combined with {constraint}")
        if constraint is not None and self.ignore_eos:
            raise bad_request("ignore_eos", f"ignore_eos cannot be combined with {constraint}, whose outputs end")
        return self

    @property
    def grammar_source(self) -> str | None:
        """The parameter that gives the grammar of the output."""
        if self.response_format is not None and self.response_format["type"] != "text":
            return "response_format"
        return None if self.structured_outputs is None else "structured_outputs"

    @property
    def response_schema(self) -> dict[str, Any] | None:
        """The schema of ``response_format``, with the JSON style applied."""
        if self.response_format is None or self.response_format["type"] == "text":
            return None
        given = self.response_format.get("json_schema", {"schema": {"type": "object"}})
        return styled(given["schema"], given.get("strict") is True)

    def grammar(self, tokenizer: Tokenizer) -> Grammar | None:
        """Compile the grammar of the output, which takes a while. Raises ConfigError if it cannot be read."""
        if (schema := self.response_schema) is not None:
            return Grammar.json_schema(schema, strict=not schema["x-guidance"]["lenient"])
        if self.structured_outputs is None:
            return None
        ((name, value),) = self.structured_outputs.items()
        match name:
            case "json":
                return Grammar.json_schema(value)
            case "regex":
                return Grammar.regex(value)
            case "choice":
                return Grammar.choice(value)
            case "grammar":
                return Grammar.context_free(value)
        return Grammar.json_object()

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def prompts(self) -> int:
        return 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The parameter that limits the output, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def prompt_alternatives(self) -> tuple[str, int | None]:
        """The parameter with the number of log-probabilities for each token of the prompt, and its value."""
        return "prompt_logprobs", None

    @property
    @abstractmethod
    def alternatives(self) -> tuple[str, int | None]:
        """The parameter with the number of log-probabilities for each token, and its value."""

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the request's sampling parameters, with ``defaults`` for missing ones.

        The caller fills in the largest number of tokens and the seed of each choice.

        Raises ApiError: status 400, with the parameter that is out of range.
        """
        shared = {field.name for field in fields(SamplingParams)} & set(type(self).model_fields)
        requested = {name: (name, getattr(self, name)) for name in shared - {"max_tokens", "logprobs"}}
        requested["top_k"] = ("top_k", None if self.top_k is None else max(self.top_k, 0))
        requested["max_tokens"] = self.output_limit
        requested["logprobs"] = self.alternatives
        requested["prompt_logprobs"] = self.prompt_alternatives
        if self.logit_bias is not None:
            requested["logit_bias"] = "logit_bias", {int(token): value for token, value in self.logit_bias.items()}
        values = {name: value for name, (_, value) in requested.items() if value is not None}
        for name, value in values.items():
            try:
                SamplingParams(**{name: value})
            except ConfigError as error:
                param = requested[name][0]
                raise bad_request(param, str(error).replace(name, param, 1)) from error
        return SamplingParams(**{**defaults, **values})

    @abstractmethod
    def tokenize(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the token ids of each prompt."""


class CompletionBody(Body):
    """The body of ``POST /v1/completions``."""

    PROMPT = "prompt"

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="a string, a list of strings, a list of token ids or a list of such lists"
    )
    max_tokens: int | None = _optional("a whole number of at least 1, or 0 with echo or prompt_logprobs", ge=0)
    best_of: int | None = _optional("equal to n")
    echo: bool | None = _optional("true or false")
    logprobs: int | None = _optional(f"a whole number from 0 to {MAX_LOGPROBS}")
    prompt_logprobs: int | None = _optional(f"a whole number from 0 to {MAX_LOGPROBS}")

    @model_validator(mode="after")
    def _check_prompt(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.choices:
            raise bad_request(
                "best_of", f"best_of must equal n ({self.choices}), not {self.best_of}: all outputs are returned"
            )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise _wrong(type(self), "max_tokens", "max_tokens", 0)
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs", "prompt_logprobs cannot be streamed")
        if self.stream and self.echo and self.logprobs is not None:
            raise bad_request("echo", "echo with logprobs cannot be streamed")
        return self

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompts(cls, prompt: object) -> object:
        if isinstance(prompt, list) and prompt and type(prompt[0]) in (str, list):
            kind = type(prompt[0])
            for number, item in enumerate(prompt):
                if type(item) is not kind:
                    raise _wrong(cls, "prompt", f"prompt.{number}", item)
                cls._check_one_prompt(item, f"prompt.{number}")
        else:
            cls._check_one_prompt(prompt, "prompt")
        return prompt

    @classmethod
    def _check_one_prompt(cls, prompt: object, path: str) -> None:
        if not isinstance(prompt, str | list):
            raise _wrong(cls, "prompt", path, prompt)
        if not prompt:
            raise bad_request("prompt", f"{path} must not be empty")
        if isinstance(prompt, list):
            for number, token in enumerate(prompt):
                if type(token) is not int:
                    raise _wrong(cls, "prompt", f"{path}.{number}", token)
                if token < 0:
                    raise bad_request("prompt", f"prompt holds a token id below 0 (at {path}.{number}: {shown(token)})")

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

    @property
    def prompt_alternatives(self) -> tuple[str, int | None]:
        echoed = self.logprobs if self.echo else None
        if echoed is None or (self.prompt_logprobs is not None and self.prompt_logprobs > echoed):
            return "prompt_logprobs", self.prompt_logprobs
        return "logprobs", echoed

    def tokenize(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in self._prompts]

    def prompt_text(self, number: int, tokens: Sequence[int], tokenizer: Tokenizer) -> str:
        """Return the text of a prompt: as it was sent or, if truncated, decoded from the remaining ``tokens``."""
        prompt = self._prompts[number]
        return prompt if isinstance(prompt, str) and self.truncate_prompt_tokens is None else tokenizer.decode(tokens)


class ChatBody(Body):
    """The body of ``POST /v1/chat/completions``."""

    PROMPT = "messages"

    messages: list[dict[str, Any]] = Field(description="a list of objects with role and content, at least one")
    chat_template_kwargs: dict[str, Any] | None = _optional("an object of variables of the model's chat template")
    max_completion_tokens: int | None = _optional("a whole number of at least 1", ge=1)
    tools: list[dict[str, Any]] | None = _optional(f"a list of at most {MAX_TOOLS} functions")
    tool_choice: str | dict[str, Any] | None = _optional(
        '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    )
    parallel_tool_calls: bool | None = _optional("true or false")
    logprobs: bool | None = _optional("true or false")
    top_logprobs: int | None = _optional(f"a whole number from 0 to {MAX_LOGPROBS}")

    @field_validator("tools", mode="plain")
    @classmethod
    def _check_tools(cls, tools: object) -> object:
        if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
            raise _wrong(cls, "tools", "tools", tools)
        names = [_checked_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise bad_request("tools", f"tools[{number}].function.name is that of another: {name!r}")
        return tools

    @field_validator("tool_choice", mode="plain")
    @classmethod
    def _check_tool_choice(cls, choice: object) -> object:
        if choice in ("none", "auto", "required"):
            return choice
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(cls, "tool_choice", "tool_choice", choice)
        return {"type": "function", "function": {"name": function["name"]}}

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs=true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise bad_request("max_tokens", "max_tokens and max_completion_tokens are the same limit, but differ")
        if self.tool_choice not in (None, "none", "auto"):
            if not self.tools:
                raise bad_request("tool_choice", "tool_choice needs tools")
            names = [function.name for function in self.functions]
            if isinstance(self.tool_choice, dict) and (name := self.tool_choice["function"]["name"]) not in names:
                hint = similar("; did you mean {}?", name[:_MAX_SHOWN], names)
                raise bad_request("tool_choice", f"there is no tool {shown(name)}{hint}")
        return self

    @property
    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def alternatives(self) -> tuple[str, int | None]:
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def functions(self) -> list[Function]:
        found = []
        for tool in self.tools or ():
            function = tool["function"]
            parameters = function.get("parameters") or {"properties": {}}
            if not parameters.keys() & {"type", "$ref", "anyOf", "allOf", "oneOf"}:
                parameters = {"type": "object", **parameters}
            found.append(Function(function["name"], parameters, function.get("strict") is True))
        return found

    @property
    def grammar_source(self) -> str | None:
        if self.uses_tools and self.tool_choice not in (None, "auto"):
            return "tool_choice"
        if self.uses_tools and self.structured_outputs is not None:
            return "tools"
        return super().grammar_source

    def tool_format(self, tokenizer: Tokenizer) -> ToolFormat | None:
        """Return the format in which the model calls tools; None if it may not call any. Raises ApiError (status 400)
        if the model's chat template has no known format.
        """
        if not self.uses_tools:
            return None
        found = find_format(tokenizer.chat_template)
        if found is None:
            reason = "the model's chat template tells it no format of calls that this server knows"
            raise bad_request("tools", f"tools are not supported: {reason} (Hermes, Llama 3.1, Mistral)")
        return found

    def grammar(self, tokenizer: Tokenizer) -> Grammar | None:
        answer = self.response_schema
        tool_format = self.tool_format(tokenizer)
        must_call = self.tool_choice not in (None, "auto")
        if tool_format is None or not (must_call or answer is not None):
            return super().grammar(tokenizer)
        named = self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None
        functions = [function for function in self.functions if named in (None, function.name)]
        several = self.parallel_tool_calls is not False and named is None
        answer = None if must_call else answer
        return calls_grammar(tool_format, functions, several, tokenizer.special_tokens, answer)

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        params = super().sampling(defaults)
        # the markers of calls are special tokens of some models
        return replace(params, skip_special_tokens=False) if self.uses_tools else params

    def tokenize(self, tokenizer: Tokenizer) -> list[list[int]]:
        tools = self.tools if self.uses_tools else None
        return [_conversation_tokens(tokenizer, self.messages, self.chat_template_kwargs, True, tools)]


class TokenizeBody(RequestBody):
    """The body of ``POST /tokenize``."""

    prompt: str | None = _optional("a string")
    messages: list[dict[str, Any]] | None = _optional("a list of objects with role and content, at least one")
    add_special_tokens: bool | None = _optional("true or false")
    add_generation_prompt: bool | None = _optional("true or false")
    chat_template_kwargs: dict[str, Any] | None = _optional("an object of variables of the model's chat template")
    return_token_strs: bool | None = _optional("true or false")

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("prompt", "either prompt or messages must be given")
        other = ("add_special_tokens",) if self.messages else ("add_generation_prompt", "chat_template_kwargs")
        for name in other:
            if getattr(self, name) is not None:
                raise bad_request(name, f"{name} needs {'prompt' if self.messages else 'messages'}")
        return self

    @property
    def source(self) -> str:
        """The parameter that holds the text."""
        return "prompt" if self.messages is None else "messages"

    def tokenize(self, tokenizer: Tokenizer) -> list[int]:
        if self.messages is None:
            return tokenizer.encode(self.prompt or "", self.add_special_tokens is not False)
        ends_open = self.add_generation_prompt is not False
        return _conversation_tokens(tokenizer, self.messages, self.chat_template_kwargs, ends_open)


class DetokenizeBody(RequestBody):
    """The body of ``POST /detokenize``."""

    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = Field(description="a list of token ids", fail_fast=True)


def _json_object(text: str) -> object:
    """Parse JSON text; return the text if it is not JSON, or would take longer to read than any body may."""
    try:
        return from_json(text) if _marks(text.encode(errors="replace")) <= MAX_PARTS else text
    except ValueError:
        return text


def _checked_tool(name: str, tool: object) -> str:
    """Check a function's description, and return its name."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        given = tool.get("type") if isinstance(tool, dict) else tool
        raise _must_be("tools", name, 'an object with the type "function"', given)
    _require_known(tool, ("type", "function"), f"{name}.")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _must_be("tools", f"{name}.function", "an object", function)
    _require_known(function, ("name", "description", "parameters", "strict"), f"{name}.function.")
    called = function.get("name")
    if not isinstance(called, str) or not _FUNCTION_NAME.fullmatch(called):
        accepted = "1 to 64 letters, digits, underscores, hyphens and dots"
        raise _must_be("tools", f"{name}.function.name", accepted, called)
    for field, kinds, accepted in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(value := function.get(field), kinds | None):
            raise _must_be("tools", f"{name}.function.{field}", accepted, value)
    return called


def _conversation_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    variables: Mapping[str, Any] | None,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    variables = variables or {}
    try:
        tokenizer.check_template_variables(variables)
    except ConfigError as error:
        raise bad_request("chat_template_kwargs", f"chat_template_kwargs: {error}") from error
    return tokenizer.apply_chat_template(messages, variables, add_generation_prompt, tools)


def _message(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message to the form that chat templates read: joined content parts, and call arguments as objects.

    The developer role becomes system, which chat templates know. Clients send back received responses with empty
    fields, so null and empty lists are ignored.

    Args:
        name: the name of the message in error messages.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise _must_be("messages", f"{name}.role", f"one of {', '.join(ROLES)}", role)
    known = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}.get(role, ())
    for field, value in message.items():
        if field not in ("role", "content", *known) and value not in (None, []):
            raise bad_request("messages", f"{name}.{field[:_MAX_SHOWN]} is not supported")
    rest: dict[str, Any] = {}
    if role == "developer":
        role = "system"
    elif role == "tool":
        rest["tool_call_id"] = message.get("tool_call_id")
        if not isinstance(rest["tool_call_id"], str):
            raise _must_be("messages", f"{name}.tool_call_id", "the id of a call, a string", rest["tool_call_id"])
    elif role == "assistant":
        if message.get("tool_calls"):
            rest["tool_calls"] = _past_calls(f"{name}.tool_calls", message["tool_calls"])
            content = "" if content is None else content
        if (thoughts := message.get("reasoning_content")) is not None:
            rest["reasoning_content"] = _content(name, thoughts, "reasoning_content")
    return {"role": role, "content": _content(name, content), **rest}


def _past_calls(name: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _must_be("messages", name, "a list", calls)
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        fields = [call.get("id"), function.get("name"), function.get("arguments")] if isinstance(function, dict) else []
        if not fields or not all(isinstance(value, str) for value in fields):
            accepted = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}} with strings'
            raise _must_be("messages", f"{name}[{number}]", accepted, call)
        arguments = _json_object(fields[2])
        called = {"name": fields[1], "arguments": arguments if isinstance(arguments, dict) else fields[2]}
        found.append({"id": fields[0], "type": "function", "function": called})
    return found


def _content(name: str, content: object, field: str = "content") -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _must_be("messages", f"{name}.{field}", "a string or a list of text parts", content)
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _must_be("messages", f"{name}.{field}[{number}]", '{"type": "text", "text": ...}', part)
        texts.append(text)
    return "".join(texts)


AnyBody = TypeVar("AnyBody", bound=RequestBody)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Parse a request body. Raises ApiError (status 400) with the problem and the parameter."""
    if _parts(raw) > MAX_PARTS:
        raise bad_request(None, f"the body has more than {MAX_PARTS} lists, objects and keys")
    try:
        values = from_json(raw)
    except ValueError as error:
        raise bad_request(None, f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise bad_request(None, f"the body must be a JSON object, not {shown(values)}")
    for name, accepted in UNSUPPORTED.items():
        value = None if name in kind.model_fields else values.pop(name, None)
        if value is not None and value not in accepted:
            raise bad_request(name, f"{name} is not supported", "unsupported_parameter")
    _require_known(values, kind.model_fields)
    # null stands for the default, so that validators see given values alone
    given = {
        name: value for name, value in values.items() if value is not None or kind.model_fields[name].is_required()
    }
    try:
        return kind.model_validate(given)
    except ValidationError as error:  # at most one for each parameter, since lists end at their first error
        raise _api_error(kind, error) from error


def _parts(raw: bytes) -> int:
    """Return the maximum number of lists, objects and keys in a body."""
    count = _marks(raw)
    return count if count <= MAX_PARTS else _marks(_STRING.sub(b"", raw))  # texts may contain any number of marks


def _marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def _require_known(values: dict[str, Any], known: Collection[str], prefix: str = "") -> None:
    """Raise ApiError for the first unknown key, suggesting the closest known one."""
    for name in values:
        if name not in known:
            path = prefix + (name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}...")
            hint = similar(f"; did you mean {prefix}{{}}?", name[:_MAX_SHOWN], known)
            raise bad_request(path, f"there is no parameter {path}{hint}", "unknown_parameter")


def _api_error(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """Return an error for the first problem that pydantic found."""
    first = error.errors(include_url=False)[0]
    path = ".".join(map(str, first["loc"]))
    param = str(first["loc"][0])
    if first["type"] == "missing":
        accepted = kind.model_fields[param].description
        return bad_request(param, f"{param} is missing; it must be {accepted}", "missing_parameter")
    return _wrong(kind, param, path, first["input"])
