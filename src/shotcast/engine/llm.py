"""The engine for scripts: ``LLM(model).generate(prompts)``."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any

from shotcast.engine.client import EngineClient, Listen, News
from shotcast.engine.config import EngineConfig
from shotcast.engine.output import OutputBuilder
from shotcast.engine.requests import EngineStats, RequestOutput, SamplingParams
from shotcast.engine.tokenizer import Tokenizer
from shotcast.errors import ConfigError
from shotcast.models.config import ModelConfig

Prompt = str | Sequence[int]
Message = Mapping[str, str]


class LLM:
    """A model, loaded on its ranks and ready to be asked::

        with LLM("smollm2", tensor_parallel=2) as llm:
            print(llm.generate("Once upon a time")[0].text)

    The script that makes one is imported by every rank, so this stands under ``if __name__ == "__main__":``.

    Args:
        model, options: of :class:`EngineConfig`.

    Raises:
        ConfigError: the model or an option is not usable.
        EngineDead: a rank ended.
    """

    def __init__(self, model: str | PathLike[str], **options: Any):
        self._client = EngineClient(EngineConfig.of(model, **options))

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
    def model(self) -> ModelConfig:
        """What the model is."""
        return self._client.ready.model

    @property
    def dtype(self) -> str:
        """Of weights and activations."""
        return self._client.ready.dtype

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return self._client.pids

    def stats(self) -> EngineStats:
        return self._client.stats

    def stamp_every(self, steps: int) -> None:
        """Change ``EngineConfig.stamp_every``; graphs that this takes are captured when they are first needed."""
        self._client.stamp_every(steps)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete prompts, all of them together.

        Args:
            prompts: one or several, each a string or token ids.
            params: for all, or one for each.

        Returns:
            One output for each prompt, in order.
        """
        several = _prompts(prompts)
        for one in params if isinstance(params, Sequence) else [params]:
            if one is not None and not isinstance(one, SamplingParams):
                raise ConfigError(f"params are SamplingParams, for all prompts or one for each, not {one!r}")
        each = [params or SamplingParams()] * len(several) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(several):
            raise ConfigError(f"there are {len(several)} prompts and {len(each)} params; give one for all, or one each")
        steps: queue.SimpleQueue[list[News]] = queue.SimpleQueue()
        streams: dict[str, _Stream] = {}
        outputs: dict[str, RequestOutput] = {}
        try:
            for prompt, one in zip(several, each, strict=True):
                stream = _Stream(self._client, prompt, one, steps.put, late=True)
                streams[stream.request_id] = stream
            while len(outputs) < len(streams):
                for news in steps.get():
                    name = news.request_id
                    if name not in outputs and (output := streams[name].take(news)).finished:
                        outputs[name] = output
        finally:
            for stream in streams.values():
                stream.close()
        return [outputs[name] for name in streams]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation: messages of ``role`` and ``content``, by the model's own template."""
        return self.generate([self.tokenizer.chat(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete a prompt; yields the output each time that it has grown."""
        steps: queue.SimpleQueue[list[News]] = queue.SimpleQueue()
        stream = _Stream(self._client, prompt, params or SamplingParams(), steps.put)
        try:
            finished = False
            while not finished:
                (news,) = steps.get()
                finished = stream.take(news).finished
                yield stream.copy()
        finally:
            stream.close()

    def close(self) -> None:
        """End the ranks."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    every = list(prompts)
    # of NumPy's and PyTorch's numbers and arrays, which all have an index, those that are numbers
    one = bool(every) and hasattr(every[0], "__index__") and getattr(every[0], "ndim", 0) == 0
    return [every] if one else every  # type: ignore[list-item, return-value]


class _Stream:
    """One request of a script."""

    def __init__(
        self, client: EngineClient, prompt: Prompt, params: SamplingParams, listen: Listen, late: bool = False
    ):
        """``late``: as :class:`OutputBuilder` has it."""
        self._client, self.request_id = client, client.new_id()
        tokens = client.prompt_tokens(prompt)
        tokenizer = client.tokenizer if isinstance(prompt, str) or params.stop or client.has_tokenizer else None
        self._builder = OutputBuilder(self.request_id, tokens, params, tokenizer, client.ready.model.eos, late)
        client.submit(self.request_id, tokens, params, listen)

    def copy(self) -> RequestOutput:
        """The output as it is now."""
        return self._builder.copy()

    def take(self, news: News) -> RequestOutput:
        """The output with what has come; it grows on. Raises what ended the request."""
        if isinstance(news.latest, Exception):
            raise news.latest
        output = self._builder.take(news.latest, news.arrived)
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """End the request, if it has not ended."""
        self._client.abort(self.request_id)
