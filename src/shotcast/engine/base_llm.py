"""The common part of :class:`~shotcast.engine.llm.LLM` and :class:`~shotcast.engine.async_llm.AsyncLLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from shotcast.engine.client import EngineClient, UpdateCallback
from shotcast.engine.config import EngineConfig
from shotcast.engine.output_processor import OutputProcessor
from shotcast.engine.outputs import EngineStats
from shotcast.engine.requests import CheckedPrompt
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.tokenizer import Tokenizer

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
        """Start a request, whose updates go to ``on_update``.

        Args:
            prompt: text, token ids, or token ids that were checked before.
            params: the sampling parameters.
            request_id: a new id.
            on_update: as in :meth:`EngineClient.submit`.
            detokenize_at_end: as in :class:`OutputProcessor`.

        Returns:
            The processor that turns the updates into the output.
        """
        client = self._client
        if params.is_constrained:
            client.check_params(params)
        tokens = (prompt if isinstance(prompt, CheckedPrompt) else client.check_prompt(prompt)).tokens
        tokenizer = client.tokenizer if isinstance(prompt, str) or params.stop or client.has_tokenizer else None
        processor = OutputProcessor(request_id, tokens, params, tokenizer, client.end_tokens, detokenize_at_end)
        client.submit(request_id, tokens, params, on_update)
        return processor
