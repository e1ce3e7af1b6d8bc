"""Checkpoints: tensors by name; each rank reads only its part."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shotcast.errors import ConfigError, similar
from shotcast.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from shotcast.layers.quantized import BlockRows, Float8Rows, GroupedRows


class Checkpoint(ABC):
    """The parameters of a model, named as in Hugging Face checkpoints ("model.layers.0.self_attn.q_proj.weight").

    Args:
        shapes: the shape of each tensor, matrices as [outputs, inputs].
    """

    def __init__(self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]):
        self.config, self.shapes = config, shapes

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Read a tensor or a part of it into new contiguous memory. Only the required part of the file is read. Returns
        a tensor of the stored dtype, or float32 if it is stored quantized. Raises ConfigError if there is no such
        tensor.

        Args:
            rows, columns: slices within the first and the second dimension, in steps of one; None for all.
        """
        return self._read(name, *self._part(name, rows, columns))

    def read_stored(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> Float8Rows | GroupedRows | BlockRows | None:
        """Read a matrix or a part of it in its storage format; None if only :meth:`read` can read it.

        Arguments and errors are the same as for :meth:`read`.
        """
        return self._read_stored(name, *self._part(name, rows, columns))

    def _part(self, name: str, rows: slice | None, columns: slice | None) -> tuple[slice, slice]:
        """Return both bounds of a part in each dimension; a vector is one column."""
        self.require(name)
        sizes = *self.shapes[name], 1
        row_part, column_part = (
            slice(*(part or slice(None)).indices(size)[:2]) for part, size in zip((rows, columns), sizes, strict=False)
        )
        return row_part, column_part

    @abstractmethod
    def _read(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """Read a part, given by the bounds of :meth:`_part`."""

    def _read_stored(self, name: str, rows: slice, columns: slice) -> Float8Rows | GroupedRows | BlockRows | None:
        return None

    @abstractmethod
    def close(self) -> None:
        """Release what is open. Nothing is read afterwards."""

    def require(self, name: str, shape: tuple[int, ...] | None = None) -> None:
        """Raise ConfigError unless there is a tensor ``name``, with this shape if given."""
        if name not in self.shapes:
            hint = similar("; similar names: {}", name, self.shapes, 3, 0.8)
            raise ConfigError(f"the checkpoint has no tensor {name!r}{hint}")
        if shape is not None and (found := self.shapes[name]) != shape:
            raise ConfigError(
                f"tensor {name!r} is {list(found)} in the checkpoint; by its configuration it is {list(shape)}"
            )

    def verify(self) -> None:
        """Raise ConfigError unless the checkpoint holds exactly the parameters that its configuration requires."""
        expected = self.config.tensors()
        for name, shape in expected.items():
            self.require(name, shape)
        # A tied head may be stored a second time, and older checkpoints hold the angles of rotary embedding.
        head = f"{self.config.names.head}.weight"
        others = [
            name
            for name in self.shapes
            if name not in expected and name != head and not name.endswith("rotary_emb.inv_freq")
        ]
        if others:
            shown = ", ".join(sorted(others)[:3])
            raise ConfigError(
                f"the checkpoint holds {len(others)} tensors that its configuration does not ask for, such as {shown}; "
                "without them the model would compute something else"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigError naming the file on failure."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content
