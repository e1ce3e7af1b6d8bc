"""Folders of Hugging Face: config.json, and weights in one or several safetensors files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.models.checkpoint import part_of, read_json, require
from shotcast.models.config import ModelConfig
from shotcast.units import about_size

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder:
    """A checkpoint in a folder. Files are mapped into memory; a read touches the pages of what is asked for.

    Raises:
        ConfigError: a file is missing, truncated or not what it should be.
        UnsupportedError: of the architecture, or the type of a tensor.
    """

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is no checkpoint: it has no config.json")
        self._slices: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            for path, listed in _files(folder).items():
                try:
                    file = stack.enter_context(safe_open(path, framework="pt"))
                except (OSError, SafetensorError) as error:
                    size = about_size(path.stat().st_size) if path.is_file() else "no file"
                    raise ConfigError(f"{path} ({size}) is truncated or no safetensors file: {error}") from error
                names = set(file.keys())
                if listed is not None and (absent := sorted(listed - names)):
                    raise ConfigError(f"{path} lacks {absent[0]!r}, which {INDEX} says is in it")
                for name in names if listed is None else listed:
                    self._slices[name] = file.get_slice(name)
            self._shapes = {name: tuple(part.get_shape()) for name, part in self._slices.items()}
            types = {name: str(part.get_dtype()) for name, part in self._slices.items()}
            for name, kind in types.items():
                if kind not in _DTYPES:
                    raise UnsupportedError(
                        f"tensor {name!r} in {folder} is of type {kind}, which is not supported; "
                        f"accepted: {', '.join(_DTYPES)}"
                    )
            self._nbytes = sum(math.prod(self._shapes[name]) * _DTYPES[kind].itemsize for name, kind in types.items())
            self._config = _config(folder, types)
            self._files = stack.pop_all()

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        require(self, name)
        return self._shapes[name]

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        shape = self.shape(name)
        if name not in self._slices:
            raise ConfigError("the checkpoint is closed")
        (first, last), (left, right) = part_of(shape, rows, columns, name)
        places = (slice(first, last), slice(left, right))[: len(shape)]
        # what comes is a view of the mapped file
        part: torch.Tensor = self._slices[name][places]
        return part.clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        self._slices.clear()
        self._files.close()


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of weights, with the tensors that the index says are in each (None: whatever is in it)."""
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ConfigError(f"{folder / INDEX} has no weight_map")
        listed: dict[Path, set[str]] = {}
        for name, file in places.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError(f"{folder / INDEX} places {name!r} in {file!r}, which is no file of that folder")
            listed.setdefault(folder / file, set()).add(name)
        if absent := sorted(path.name for path in listed if not path.is_file()):
            raise ConfigError(f"{folder} lacks {', '.join(absent)}, of {len(listed)} files that {INDEX} names")
        return dict(listed)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if others:
        raise ConfigError(
            f"{folder} holds its weights as {others[0]}, which can run code when it is read; convert it to "
            'safetensors: AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(other_folder)'
        )
    raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _config(folder: Path, types: dict[str, str]) -> ModelConfig:
    said = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if not said.get("dtype") and not said.get("torch_dtype"):
        first = min(types) if types else None
        said["dtype"] = str(_DTYPES[types[first]]).removeprefix("torch.") if first else "float32"
    return ModelConfig.from_hf(said, read_json(generation) if generation.is_file() else None)
