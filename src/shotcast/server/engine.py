"""The engine, as the server sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from shotcast.engine.requests import EngineStats, RequestOutput, SamplingParams


class Tokenizer(Protocol):
    """Text to token ids and back. It is asked from one thread of its own and from the event loop's."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

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

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, each time it grew; the last is ``finished``. Cancelling the iteration aborts the request.

        Raises:
            ConfigError: the prompt or its parameters cannot be served.
            EngineDead: the engine stopped.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def wait_dead(self) -> BaseException:
        """Returns when the engine stopped for good, and says why."""
        ...

    async def close(self) -> None: ...
