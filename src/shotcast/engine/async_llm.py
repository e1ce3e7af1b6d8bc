"""The engine for servers: requests of one event loop, each a stream of outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from shotcast.engine.client import EngineClient, News
from shotcast.engine.config import EngineConfig
from shotcast.engine.output import OutputBuilder
from shotcast.engine.requests import EngineStats, RequestOutput, SamplingParams
from shotcast.engine.tokenizer import Tokenizer
from shotcast.errors import EngineDead


class AsyncLLM:
    """As :class:`shotcast.engine.llm.LLM`; construction waits until the model is loaded.

    Args:
        model, options: of :class:`EngineConfig`.
    """

    def __init__(self, model: str, **options: Any):
        self._client = EngineClient(EngineConfig(model, **options))
        self.model_name = model

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

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; yields the output each time that it has grown. Closing the iterator aborts the request.

        Raises:
            ConfigError: the prompt cannot be served.
            EngineDead: a rank ended.
        """
        client = self._client
        name = client.new_id() if request_id is None else request_id
        tokens = client.prompt_tokens(prompt)
        tokenizer = client.tokenizer if isinstance(prompt, str) or params.stop or client.has_tokenizer else None
        builder = OutputBuilder(name, tokens, params, tokenizer, client.ready.model.eos)
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[News] = asyncio.Queue()

        def listen(item: News) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.put_nowait, item)

        client.submit(name, tokens, params, listen)
        try:
            while True:
                item, arrived = await news.get()
                if isinstance(item, Exception):
                    raise item
                # outputs that nobody has read yet become one
                output = builder.take(item, arrived)
                delta = output.delta
                while not output.finished and not news.empty():
                    item, arrived = news.get_nowait()
                    if isinstance(item, Exception):
                        raise item
                    output = builder.take(item, arrived)
                    delta += output.delta
                output.delta = delta
                yield builder.copy()
                if output.finished:
                    return
        finally:
            client.abort(name)

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
