"""Checks, before any rank starts, that a draft model can propose tokens for a model."""

from __future__ import annotations

import contextlib

from shotcast.engine.config import EngineConfig, max_model_len_of
from shotcast.engine.tokenizer import Tokenizer
from shotcast.errors import ConfigError
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import require_division
from shotcast.models.source import open_checkpoint


def require_draft(config: EngineConfig, model: ModelConfig) -> None:
    """Check that the draft model of a configuration can propose tokens for a model.

    Raises:
        ConfigError: it has another tokenizer or vocabulary, fewer positions, or cannot be divided among the ranks.
    """
    assert config.speculation is not None
    name = config.speculation.model
    with contextlib.closing(open_checkpoint(name)) as checkpoint:
        draft = checkpoint.config
    require_division(draft, config.tensor_parallel, 1)
    length = max_model_len_of(config, model)
    if draft.max_position < length:
        raise ConfigError(
            f"the draft model {name} was made for {draft.max_position} tokens, fewer than max_model_len ({length})"
        )
    vocabularies = [_vocabulary(each) for each in (config.model, name)]
    if vocabularies[0] != vocabularies[1] or (vocabularies[0] is None and draft.vocab != model.vocab):
        raise ConfigError(f"the draft model {name} must have the tokenizer of {config.model}, and it has another one")


def _vocabulary(model: str) -> dict[str, int] | None:
    """Return the tokens of a model's tokenizer; None if it has none."""
    try:
        return Tokenizer.load(model).vocabulary()
    except ConfigError:
        return None
