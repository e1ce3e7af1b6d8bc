"""Checkpoints: tensors by name, of which each rank reads its part."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from shotcast.errors import ConfigError
from shotcast.models.config import ModelConfig


class Checkpoint(Protocol):
    """A model's parameters, named as Hugging Face names them ("model.layers.0.self_attn.q_proj.weight")."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def nbytes(self) -> int:
        """Of all tensors, as they are stored."""
        ...

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """A tensor or a part of it, in memory of its own, contiguous; no more of the file is read than it takes.

        Args:
            rows, columns: of the first and the second dimension, in steps of one; None for all.

        Returns:
            It is of the type that is stored; float32 for one that is quantised.

        Raises:
            ConfigError: there is no such tensor, or not so much of it.
        """
        ...

    def close(self) -> None: ...


def require(checkpoint: Checkpoint, name: str, shape: tuple[int, ...] | None = None) -> None:
    """Raises ConfigError unless ``name`` is there, with this shape if one is given."""
    if name not in checkpoint.names():
        close = difflib.get_close_matches(name, checkpoint.names(), 3, 0.8)
        also = f"; there are {', '.join(close)}" if close else ""
        raise ConfigError(f"the checkpoint has no tensor {name!r}{also}")
    if shape is not None and (found := checkpoint.shape(name)) != shape:
        raise ConfigError(
            f"tensor {name!r} is {list(found)} in the checkpoint; by its configuration it is {list(shape)}"
        )


def verify(checkpoint: Checkpoint) -> None:
    """Raises ConfigError unless the checkpoint holds the parameters that its configuration asks for, and no others."""
    expected = checkpoint.config.tensors()
    for name, shape in expected.items():
        require(checkpoint, name, shape)
    # A tied head may be stored a second time, and older checkpoints hold the angles of rotary embedding.
    others = [
        name
        for name in checkpoint.names()
        if name not in expected and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")
    ]
    if others:
        shown = ", ".join(sorted(others)[:3])
        raise ConfigError(
            f"the checkpoint holds {len(others)} tensors that its configuration does not ask for, such as {shown}; "
            "without them the model would compute something else"
        )


def bounds(part: slice | None, size: int, what: str) -> tuple[int, int]:
    """First and last + 1 of a part of a dimension. Raises ConfigError if it is not within it."""
    if part is None:
        return 0, size
    first = 0 if part.start is None else part.start
    last = size if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= first <= last <= size:
        raise ConfigError(f"{what} are a slice within 0:{size} in steps of one, not {part}")
    return first, last


def part_of(
    shape: tuple[int, ...], rows: slice | None, columns: slice | None, name: str
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bounds of the rows and columns of a part; a vector is one column."""
    if len(shape) < 2 and columns is not None:
        raise ConfigError(f"{name!r} is a vector; it has no columns to take")
    return (
        bounds(rows, shape[0], f"rows of {name!r}"),
        bounds(columns, shape[1] if len(shape) > 1 else 1, f"columns of {name!r}"),
    )


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file. Raises ConfigError naming the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return found
