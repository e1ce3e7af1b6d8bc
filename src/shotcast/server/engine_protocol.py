"""The interfaces of the engine and its tokenizer that the server uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from shotcast.engine.grammar import Grammar
from shotcast.engine.outputs import EngineStats, OutputCallback
from shotcast.engine.requests import CheckedPrompt
from shotcast.engine.sampling_params import SamplingParams


class Tokenizer(Protocol):
    """Converts text to token ids and back. Two threads use it: the worker thread and that of the event loop."""

    @property
    def chat_template(self) -> str:
        """The source of the template of conversations with tools; "" if there is none."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The tokens that no text spells, by name."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the token ids of a text, with the special tokens that begin or end it unless told otherwise."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of token ids. Unknown tokens have none, nor do special tokens that are skipped."""
        ...

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        """Return the text of one token that follows others; "" for a special token that is skipped."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation by the model's chat template, up to where the answer begins.

        Args:
            messages: each with ``role`` and ``content``.
            variables: further variables of the template, by name.
            add_generation_prompt: end with the tokens that begin an answer.
            tools: the functions that the answer may call, in OpenAI's format.

        Raises:
            ConfigError: the model has no chat template, or the template refuses the conversation or the variables.
        """
        ...

    def check_template_variables(self, names: Iterable[str]) -> None:
        """Raise ConfigError if one of the names cannot be that of a variable of a chat template."""
        ...


class Engine(Protocol):
    """An engine that completes prompts. Unless it says otherwise, a method is called from one event loop."""

    @property
    def model_name(self) -> str:
        """The name of the model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its output together."""
        ...

    @property
    def vocab(self) -> int:
        """The number of tokens that the model may sample."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The sampling parameters, by name, of requests that do not give them."""
        ...

    @property
    def dead(self) -> BaseException | None:
        """Why the engine died; None while it is alive."""
        ...

    def check_prompt(self, prompt: Sequence[int]) -> CheckedPrompt:
        """Return the token ids of a prompt after checking them. This is called on a thread.

        Raises:
            ConfigError: the prompt cannot be served.
        """
        ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Check that a grammar can be compiled. This is called on a thread, and takes a second at most.

        Raises:
            ConfigError: it cannot be compiled.
        """
        ...

    def start(self, prompt: CheckedPrompt, params: SamplingParams, request_id: str, on_output: OutputCallback) -> None:
        """Complete a prompt. ``on_output``, which must not raise, is called in this loop until the output ends.

        Raises:
            ConfigError: the request cannot be served.
            EngineDead: the engine has died.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request, whose callback is not called again. Nothing happens if it has ended."""
        ...

    def stats(self) -> EngineStats:
        """Return the counters of the engine."""
        ...

    async def wait_dead(self) -> BaseException:
        """Wait until the engine dies, and return why."""
        ...

    async def close(self) -> None:
        """End the engine."""
        ...
