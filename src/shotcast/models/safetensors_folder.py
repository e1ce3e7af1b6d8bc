"""Hugging Face folders: config.json, and weights in one or more safetensors files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.models.checkpoint import Checkpoint, read_json
from shotcast.models.config import ModelConfig
from shotcast.models.hf_config import family_of, read_hf_config
from shotcast.models.quantization_config import read_quantization
from shotcast.units import about_size

if TYPE_CHECKING:
    import torch

    from shotcast.layers.quantized import Float8Rows, GroupedRows
    from shotcast.models.quantized_matrix import QuantizedMatrix

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsFolder(Checkpoint):
    """A checkpoint in a folder. The files are mapped into memory; a read touches only the pages of the part, and
    dequantizes it. Raises ConfigError if a file is missing, truncated or malformed. Raises UnsupportedError if the
    architecture or a tensor type is not supported.
    """

    def __init__(self, folder: Path):
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not a checkpoint: it has no config.json")
        config = read_json(folder / "config.json")
        family_of(config)  # whoever has an unsupported model needs no advice on its weights
        self._paths: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        shapes, types = {}, {}
        for path, listed in weight_files(folder).items():
            with _opened(path, "numpy") as file:  # which lists tensors without PyTorch
                names = set(file.keys())
                if listed is not None and (absent := sorted(listed - names)):
                    raise ConfigError(f"{path} lacks {absent[0]!r}, which {INDEX} says is in it")
                for name in names if listed is None else listed:
                    part = file.get_slice(name)
                    self._paths[name] = path
                    shapes[name], types[name] = tuple(part.get_shape()), str(part.get_dtype())
        with contextlib.ExitStack() as stack:
            self._files = stack
            self._quantized: dict[str, QuantizedMatrix] = {}
            if quantization := read_quantization(config):
                from shotcast.models.quantized_matrix import quantized_matrices

                slices = {name: self._slice(name) for name in self._paths}
                self._quantized, used = quantized_matrices(quantization, slices, self._tensor)
                shapes = {name: shape for name, shape in shapes.items() if name not in used}
            for name in shapes:
                if types[name] not in _DTYPES:
                    raise UnsupportedError(
                        f"tensor {name!r} in {folder} is of type {types[name]}, which is not supported; "
                        f"accepted: {', '.join(_DTYPES)}"
                    )
            types = {name: types[name] for name in shapes}
            shapes |= {name: matrix.shape for name, matrix in self._quantized.items()}
            super().__init__(_config(folder, config, types), shapes)
            self._files = stack.pop_all()

    def _slice(self, name: str) -> Any:
        """Return a tensor in its mapped file, readable in parts."""
        path = self._paths[name]
        if path not in self._open:
            self._open[path] = self._files.enter_context(_opened(path, "pt"))
        return self._open[path].get_slice(name)

    def _tensor(self, name: str) -> torch.Tensor:
        whole: torch.Tensor = self._open[self._paths[name]].get_tensor(name)
        return whole

    def _read(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        if name in self._quantized:
            return self._quantized[name].read(rows, columns)
        # the result is a view of the mapped file
        part: torch.Tensor = self._slice(name)[(rows, columns)[: len(self.shapes[name])]]
        import torch

        return part.clone(memory_format=torch.contiguous_format)

    def _read_stored(self, name: str, rows: slice, columns: slice) -> Float8Rows | GroupedRows | None:
        return self._quantized[name].stored(rows, columns) if name in self._quantized else None

    def close(self) -> None:
        self._quantized.clear()
        self._open.clear()
        self._files.close()


def _opened(path: Path, framework: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        size = about_size(path.stat().st_size) if path.is_file() else "no file"
        raise ConfigError(f"{path} ({size}) is truncated or no safetensors file: {error}") from error


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Return the weight files and the tensors of each (None: all). Raises ConfigError if one is missing, or all are."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{folder / INDEX} has no weight_map")
        listed: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
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


def _config(folder: Path, config: dict[str, Any], types: dict[str, str]) -> ModelConfig:
    generation = folder / "generation_config.json"
    if not config.get("dtype") and not config.get("torch_dtype"):
        first = min(types) if types else None
        config["dtype"] = _DTYPES[types[first]] if first else "float32"
    return read_hf_config(config, read_json(generation) if generation.is_file() else None)
