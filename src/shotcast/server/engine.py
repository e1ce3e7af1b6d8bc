"""The engine, as the server sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shotcast.engine.requests import EngineStats, ListenToOutput, SamplingParams


class Tokenizer(Protocol):
    """Text to token ids and back. It is asked from one thread of its own and from the event loop's."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def alone(self, token: int, skip_special: bool = True) -> str:
        """Text of one token that follows others; nothing for a special one that is skipped."""
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation of ``role`` and ``content`` as the model was trained on it, up to where its answer starts.

        Raises:
            ConfigError: the model has no chat template, or the template refuses the conversation.
        """
        ...


class Engine(Protocol):
    """Prompts in, outputs as they grow. All of it belongs to one event loop."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its output together."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def dead(self) -> BaseException | None:
        """Why the engine stopped for good."""
        ...

    def start(self, prompt: Sequence[int], params: SamplingParams, request_id: str, listen: ListenToOutput) -> None:
        """``listen`` is told in this loop, until the output is finished or an error ends it. It does not raise.

        Raises:
            ConfigError: the prompt or its parameters cannot be served.
            EngineDead: the engine stopped.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request, of which nothing more is told. Nothing happens if it has ended."""
        ...

    def stats(self) -> EngineStats: ...

    async def wait_dead(self) -> BaseException:
        """Returns when the engine stopped for good, and says why."""
        ...

    async def close(self) -> None: ...
