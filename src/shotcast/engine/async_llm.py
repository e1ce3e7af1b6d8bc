"""The engine for servers: requests from one event loop, with a callback for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from os import PathLike
from typing import Any

from shotcast.engine.client import EngineClient, RequestUpdate
from shotcast.engine.output_processor import OutputProcessor
from shotcast.engine.outputs import OutputCallback, RequestOutput
from shotcast.engine.requests import CheckedPrompt
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import EngineDead

logger = logging.getLogger(__name__)


class AsyncLLM(EngineClient):
    """An :class:`~shotcast.engine.llm.LLM` for an event loop; construction waits until the model is loaded.

    Callbacks are called one after another, without a task for each: a task switch takes longer than the work for a
    token.

    Args:
        model, options: as in :class:`EngineConfig`.
    """

    def __init__(self, model: str | PathLike[str], **options: Any):
        super().__init__(model, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, tuple[OutputProcessor, OutputCallback]] = {}

    @property
    def model_name(self) -> str:
        """The model, as it was given."""
        return self.config.model

    def start(
        self,
        prompt: str | Sequence[int] | CheckedPrompt,
        params: SamplingParams,
        request_id: str,
        on_output: OutputCallback,
    ) -> None:
        """Complete a prompt.

        Args:
            prompt: text, token ids, or the result of :meth:`check_prompt`.
            params: the sampling parameters.
            request_id: a new id.
            on_output: called in this event loop until the output is finished or an error ends it.

        Raises:
            ConfigError: the prompt cannot be served, or an unfinished request has the same id.
            EngineDead: a rank ended.
        """
        self._loop = asyncio.get_running_loop()
        processor = self._submit(prompt, params, request_id, self._on_updates)
        self._running[request_id] = processor, on_output

    def abort(self, request_id: str) -> None:
        """Abort a request and drop its callback. Does nothing if the request has ended."""
        if self._running.pop(request_id, None) is not None:
            self._abort(request_id)

    def _on_updates(self, updates: list[RequestUpdate]) -> None:
        """Wake up the event loop once per step. Runs on a client thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        """Route each update of a step to its callback. An error in one request goes to its callback only."""
        for request_id, result, arrived in updates:
            if (running := self._running.get(request_id)) is None:
                continue
            processor, on_output = running
            output: RequestOutput | Exception
            try:
                output = result if isinstance(result, Exception) else processor.update(result, arrived)
            except Exception as error:
                output = error
            if isinstance(output, Exception) or output.finished:
                self.abort(request_id)  # the ranks know nothing of stop strings
            try:
                on_output(output)
            except Exception:  # an error in one callback must not keep the others from theirs
                logger.exception("the callback of request %s failed", request_id)

    async def wait_dead(self) -> EngineDead:
        """Wait until the engine dies, and return why."""
        return await asyncio.shield(asyncio.wrap_future(self._death))  # cancelling this wait must not cancel others

    async def close(self) -> None:
        """End the ranks."""
        await asyncio.to_thread(self._close)
