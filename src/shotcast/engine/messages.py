"""Messages between the process that starts the engine and rank 0, where the engine core runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shotcast.engine.outputs import EngineCoreOutput, EngineStats
from shotcast.models.config import ModelConfig

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of rank 0. A heartbeat is the message None."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine whose ranks have all loaded the model. This is the first message of rank 0."""

    model: ModelConfig
    max_model_len: int
    kv_blocks: int
    dtype: str
    capture_s: float


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """The outputs of one step, sent by rank 0."""

    # each :class:`EngineCoreOutput` as a plain tuple, which is ten times as fast to pickle and unpickle
    outputs: list[tuple[Any, ...]]
    stats: EngineStats  # counters after the step

    @classmethod
    def pack(cls, outputs: Iterable[EngineCoreOutput], stats: EngineStats) -> EngineCoreOutputs:
        """Convert the outputs to plain tuples."""
        return cls([tuple(output) for output in outputs], stats)


@dataclass(frozen=True, slots=True)
class RejectedRequest:
    """A request that cannot be served, with the reason. Sent by rank 0."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """A command for rank 0 to abort a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AddEndTokens:
    """The tokenizer's end tokens, in addition to the model configuration's. Precedes all requests."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SetStampEvery:
    """A command for rank 0 to change ``EngineConfig.stamp_every``."""

    every: int
