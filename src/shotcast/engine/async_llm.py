"""The engine for servers: requests of one event loop, which is told of outputs as they grow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from os import PathLike
from typing import Any

from shotcast.engine.client import EngineClient, News
from shotcast.engine.config import EngineConfig
from shotcast.engine.output import OutputBuilder
from shotcast.engine.requests import EngineStats, ListenToOutput, RequestOutput, SamplingParams
from shotcast.engine.tokenizer import Tokenizer
from shotcast.errors import EngineDead

logger = logging.getLogger(__name__)


class AsyncLLM:
    """As :class:`shotcast.engine.llm.LLM`; construction waits until the model is loaded.

    Listeners are called one after another, without a task for each: switching between tasks takes longer than what
    there is to do for a token.

    Args:
        model, options: of :class:`EngineConfig`.
    """

    def __init__(self, model: str | PathLike[str], **options: Any):
        config = EngineConfig.of(model, **options)
        self._client = EngineClient(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, tuple[OutputBuilder, ListenToOutput]] = {}
        self.model_name = config.model

    @property
    def config(self) -> EngineConfig:
        return self._client.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._client.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        return self._client.ready.max_model_len

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return self._client.pids

    @property
    def dead(self) -> EngineDead | None:
        """Why the engine is gone, when it went by itself."""
        return self._client.dead

    def stats(self) -> EngineStats:
        return self._client.stats

    def start(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str, listen: ListenToOutput
    ) -> None:
        """Complete a prompt. ``listen`` is told in this event loop, until the output is finished or an error ends it.

        Raises:
            ConfigError: the prompt cannot be served, or there is a request of this name.
            EngineDead: a rank ended.
        """
        client = self._client
        tokens = client.prompt_tokens(prompt)
        tokenizer = client.tokenizer if isinstance(prompt, str) or params.stop or client.has_tokenizer else None
        builder = OutputBuilder(request_id, tokens, params, tokenizer, client.ready.model.eos)
        self._loop = asyncio.get_running_loop()
        client.submit(request_id, tokens, params, self._hear)
        self._running[request_id] = builder, listen

    def abort(self, request_id: str) -> None:
        """End a request, of which nothing more is told. Nothing happens if it has ended."""
        if self._running.pop(request_id, None) is not None:
            self._client.abort(request_id)

    def _hear(self, news: list[News]) -> None:
        """On a thread of the engine's: wake up the loop, once a step."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # a loop that is closed
            self._loop.call_soon_threadsafe(self._sort, news)

    def _sort(self, news: list[News]) -> None:
        """Of a step, each to its own. What goes wrong with one is told to that one."""
        for name, latest, arrived in news:
            if (running := self._running.get(name)) is None:
                continue
            builder, listen = running
            told: RequestOutput | Exception
            try:
                told = latest if isinstance(latest, Exception) else builder.take(latest, arrived)
            except Exception as error:
                told = error
            if isinstance(told, Exception) or told.finished:
                self.abort(name)  # a stop string is nothing that the ranks know
            try:
                listen(told)
            except Exception:  # of one listener; the others are to hear
                logger.exception("a listener of request %s failed", name)

    async def wait_dead(self) -> EngineDead:
        """Return when the engine is gone by itself."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[EngineDead] = loop.create_future()

        def tell(dead: EngineDead) -> None:
            if not gone.done():
                gone.set_result(dead)

        def listen(dead: EngineDead) -> None:
            loop.call_soon_threadsafe(tell, dead)

        self._client.on_death(listen)
        return await gone

    async def close(self) -> None:
        """End the ranks."""
        await asyncio.to_thread(self._client.close)
