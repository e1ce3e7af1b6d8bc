"""The engine for scripts: ``LLM(model).generate(prompts)``."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shotcast.engine.client import EngineClient, RequestUpdate, UpdateCallback
from shotcast.engine.config import EngineConfig
from shotcast.engine.output_processor import OutputProcessor
from shotcast.engine.outputs import EngineStats, RequestOutput
from shotcast.engine.requests import CheckedPrompt
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.tokenizer import Tokenizer
from shotcast.errors import ConfigError
from shotcast.models.config import ModelConfig

if TYPE_CHECKING:
    from shotcast.engine.layout_choice import LayoutChoice


class BaseLLM:
    """A model that is loaded on its ranks, without a way to wait for outputs.

    Args:
        model, options: as in :class:`EngineConfig`.
    """

    def __init__(self, model: str | PathLike[str], **options: Any):
        self._client = EngineClient(EngineConfig.from_options(model, **options))

    @property
    def config(self) -> EngineConfig:
        """The configuration of the engine, with the selected device and layout."""
        return self._client.config

    @property
    def layout_choice(self) -> LayoutChoice | None:
        """Why the engine has its layout, where ``layout="auto"`` chose it; else None."""
        return self._client.layout_choice

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError for a model without one."""
        return self._client.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        return self._client.info.max_model_len

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The sampling parameters, by name, of requests that do not give them, from ``generation_config.json``."""
        return self._client.sampling_defaults

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of requests without any."""
        return SamplingParams(**self.sampling_defaults)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return self._client.pids

    def stats(self) -> EngineStats:
        """Return the counters of the engine as of the last step."""
        return self._client.stats

    def __repr__(self) -> str:
        config = self.config
        layout = f"layout={config.tensor_parallel}x{config.pipeline_parallel}"
        return f"{type(self).__name__}({config.model!r}, {layout}, device={config.device}, {self._client.state})"

    def _submit(
        self,
        prompt: str | Sequence[int] | CheckedPrompt,
        params: SamplingParams,
        request_id: str,
        on_update: UpdateCallback,
        detokenize_at_end: bool = False,
    ) -> OutputProcessor:
        """Start a request, whose updates go to ``on_update``, and return what turns these into its output."""
        client = self._client
        if params.is_constrained:
            client.check_params(params)
        tokens = (prompt if isinstance(prompt, CheckedPrompt) else client.check_prompt(prompt)).tokens
        tokenizer = client.tokenizer if isinstance(prompt, str) or params.stop or client.has_tokenizer else None
        processor = OutputProcessor(request_id, tokens, params, tokenizer, client.end_tokens, detokenize_at_end)
        client.submit(request_id, tokens, params, on_update)
        return processor


Prompt = str | Sequence[int]
Message = Mapping[str, str]


class LLM(BaseLLM):
    """A model that is loaded on its ranks and completes prompts::

        with LLM("smollm2", tensor_parallel=2) as llm:
            print(llm.generate("Once upon a time")[0].text)

    Every rank imports the script that creates an LLM, so this code must be under ``if __name__ == "__main__":``.

    Args:
        model, options: as in :class:`EngineConfig`.

    Raises:
        ConfigError: the model or an option cannot be used.
        EngineDead: a rank ended while it loaded the model.
    """

    @property
    def model(self) -> ModelConfig:
        """The configuration of the model."""
        return self._client.info.model

    @property
    def dtype(self) -> str:
        """Data type of weights and activations."""
        return self._client.info.dtype

    def stamp_every(self, steps: int) -> None:
        """Change ``EngineConfig.stamp_every``. Graphs that this needs are captured on first use."""
        self._client.stamp_every(steps)

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
                request_id = self._client.new_id()
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
                self._client.abort(request_id)
        return [outputs[request_id] for request_id in processors]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation by the model's own chat template. Messages have a ``role`` and ``content``."""
        return self.generate([self.tokenizer.apply_chat_template(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete a prompt, and yield the output each time it has grown."""
        updates: queue.SimpleQueue[list[RequestUpdate]] = queue.SimpleQueue()
        request_id = self._client.new_id()
        processor = self._submit(prompt, params or self.default_params(), request_id, updates.put)
        try:
            finished = False
            while not finished:
                (update,) = updates.get()
                finished = self._process(processor, update).finished
                yield processor.copy()
        finally:
            self._client.abort(request_id)

    def _process(self, processor: OutputProcessor, update: RequestUpdate) -> RequestOutput:
        """Return the output after an update. Raise the error that ended the request, if one did."""
        if isinstance(update.result, Exception):
            raise update.result
        output = processor.update(update.result, update.arrived)
        if output.finished:
            self._client.abort(update.request_id)  # the ranks know nothing of stop strings
        return output

    def close(self) -> None:
        """End the ranks."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    # Numbers and arrays of NumPy and PyTorch all have an index; those without dimensions are numbers.
    is_token_ids = bool(items) and hasattr(items[0], "__index__") and getattr(items[0], "ndim", 0) == 0
    return [items] if is_token_ids else items  # type: ignore[list-item, return-value]
