"""The engine for scripts: ``LLM(model).generate(prompts)``."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shotcast.engine.client import EngineClient, RequestUpdate
from shotcast.engine.messages import SetStampEvery
from shotcast.engine.output_processor import OutputProcessor
from shotcast.engine.outputs import RequestOutput
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import ConfigError
from shotcast.models.config import ModelConfig

Prompt = str | Sequence[int]
Message = Mapping[str, str]


class LLM(EngineClient):
    """A model loaded on its ranks that completes prompts::

        with LLM("smollm2", tensor_parallel=2) as llm:
            print(llm.generate("Once upon a time")[0].text)

    Every rank imports the script that creates an LLM, so this code must be under ``if __name__ == "__main__":``.

    Args:
        model, options: as in :class:`EngineConfig`.

    Raises:
        ConfigError: the model or an option cannot be used.
        EngineDead: a rank ended while loading the model.
    """

    @property
    def model(self) -> ModelConfig:
        """The configuration of the model."""
        return self._info.model

    @property
    def dtype(self) -> str:
        """The data type of weights and activations."""
        return self._info.dtype

    def stamp_every(self, steps: int) -> None:
        """Change ``EngineConfig.stamp_every``. Graphs that this needs are captured on first use."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ConfigError(f"stamp_every must be a whole number of at least 0, not {steps!r}")
        with self._lock:
            if self.dead is None and not self._closing:
                self._outgoing.put(SetStampEvery(steps))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete prompts, all of them together.

        Args:
            prompts: one or several prompts, each a string or token ids.
            params: sampling parameters for all prompts, or one for each; :meth:`default_params` for None.

        Returns:
            One output for each prompt, in order.
        """
        prompt_list = _prompt_list(prompts)
        given = list(params) if isinstance(params, Sequence) else [params]
        for each in given:
            if each is not None and not isinstance(each, SamplingParams):
                raise ConfigError(f"params must be SamplingParams, for all prompts or one for each, not {each!r}")
        params_list = given if isinstance(params, Sequence) else given * len(prompt_list)
        if len(params_list) != len(prompt_list):
            raise ConfigError(
                f"there are {len(prompt_list)} prompts and {len(params_list)} params; give one for all, or one each"
            )
        updates: queue.SimpleQueue[list[RequestUpdate]] = queue.SimpleQueue()
        processors: dict[str, OutputProcessor] = {}
        outputs: dict[str, RequestOutput] = {}
        try:
            for prompt, each in zip(prompt_list, params_list, strict=True):
                request_id = self._new_id()
                processors[request_id] = self._submit(
                    prompt, each or self.default_params(), request_id, updates.put, detokenize_at_end=True
                )
            while len(outputs) < len(processors):
                for update in updates.get():
                    request_id = update.request_id
                    if request_id not in outputs:
                        output = self._process(processors[request_id], update)
                        if output.finished:
                            outputs[request_id] = output
        finally:
            for request_id in processors:
                self._abort(request_id)
        return [outputs[request_id] for request_id in processors]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation with the model's chat template. Messages have a ``role`` and ``content``."""
        return self.generate([self.tokenizer.apply_chat_template(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete a prompt, and yield the output each time it has grown."""
        updates: queue.SimpleQueue[list[RequestUpdate]] = queue.SimpleQueue()
        request_id = self._new_id()
        processor = self._submit(prompt, params or self.default_params(), request_id, updates.put)
        try:
            finished = False
            while not finished:
                (update,) = updates.get()
                finished = self._process(processor, update).finished
                yield processor.copy()
        finally:
            self._abort(request_id)

    def _process(self, processor: OutputProcessor, update: RequestUpdate) -> RequestOutput:
        """Return the output after an update. Raises the error that ended the request, if any."""
        if isinstance(update.result, Exception):
            raise update.result
        output = processor.update(update.result, update.arrived)
        if output.finished:
            self._abort(update.request_id)  # the ranks know nothing of stop strings
        return output

    def close(self) -> None:
        """End the ranks."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    # Numbers and arrays of NumPy and PyTorch all have an index; those without dimensions are numbers.
    is_token_ids = bool(items) and hasattr(items[0], "__index__") and getattr(items[0], "ndim", 0) == 0
    return [items] if is_token_ids else items  # type: ignore[list-item, return-value]
