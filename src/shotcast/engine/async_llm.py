"""The engine for servers: requests of one event loop, each a stream of outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
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
        self._inbox: _Inbox | None = None
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
        """Complete a prompt; yields the output, always the same, each time that it has grown.

        What came between two looks at it is one ``delta``. Closing the iterator aborts the request.

        Raises:
            ConfigError: the prompt cannot be served.
            EngineDead: a rank ended.
        """
        client = self._client
        name = client.new_id() if request_id is None else request_id
        tokens = client.prompt_tokens(prompt)
        tokenizer = client.tokenizer if isinstance(prompt, str) or params.stop or client.has_tokenizer else None
        builder = OutputBuilder(name, tokens, params, tokenizer, client.ready.model.eos)
        inbox = self._inbox_of(asyncio.get_running_loop())
        client.submit(name, tokens, params, inbox.listen)
        try:
            finished = False
            with inbox.stream(name) as stream:
                while not finished:
                    output = _taken(builder, await stream.news())
                    finished = output.finished
                    yield output
        finally:
            client.abort(name)

    def _inbox_of(self, loop: asyncio.AbstractEventLoop) -> _Inbox:
        if self._inbox is None or self._inbox.loop is not loop:
            self._inbox = _Inbox(loop)
        return self._inbox

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


class _Inbox:
    """Where news of an event loop's requests come in: it is woken up once a step, whatever the number of requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._streams: dict[str, _Stream] = {}

    def listen(self, news: list[News]) -> None:
        """On a thread of the engine's."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._sort, news)

    @contextmanager
    def stream(self, request_id: str) -> Iterator[_Stream]:
        """The news of a request that this loop has just submitted."""
        stream = self._streams[request_id] = _Stream()
        try:
            yield stream
        finally:
            del self._streams[request_id]

    def _sort(self, news: list[News]) -> None:
        for one in news:
            if (stream := self._streams.get(one.request_id)) is not None:
                stream.put(one)


class _Stream:
    """News of one request that nobody has read yet."""

    def __init__(self) -> None:
        self._unread: list[News] = []
        self._some = asyncio.Event()

    def put(self, news: News) -> None:
        self._unread.append(news)
        self._some.set()

    async def news(self) -> list[News]:
        """All of it, at least one."""
        await self._some.wait()
        self._some.clear()
        news, self._unread = self._unread, []
        return news


def _taken(builder: OutputBuilder, news: list[News]) -> RequestOutput:
    """The output, grown by all news, or what ended the request."""
    delta = ""
    for _, latest, arrived in news:
        if isinstance(latest, Exception):
            raise latest
        output = builder.take(latest, arrived)
        delta += output.delta
        if output.finished:  # by a stop string, maybe, of which the engine does not know yet
            break
    output.delta = delta
    return output
