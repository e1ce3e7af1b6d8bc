"""GGUF files, as read by llama.cpp. Weights are usually quantized, in blocks along each row.

Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.kernels.block_formats import BLOCKS
from shotcast.layers.rope import Rope
from shotcast.models.checkpoint import Checkpoint
from shotcast.models.config import ModelConfig
from shotcast.models.families import by_gguf_architecture
from shotcast.models.gguf_header import GgufHeader, TensorLocation
from shotcast.models.weight_names import GGUF_LLAMA, WeightNames
from shotcast.units import about_size

if TYPE_CHECKING:
    import torch
    from gguf import GGMLQuantizationType

    from shotcast.layers.quantized import BlockRows

TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
"""Accepted tensor types."""

_DIVISORS = "rope_freqs.weight"

_NEUTRAL = {
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.dimension_sections": (),
    "attention.sliding_window_pattern": (),
}
"""Metadata that changes the computation, with the values under which the implementation here is correct."""


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor in the file."""

    type: GGMLQuantizationType  # how its values are stored
    shape: tuple[int, ...]  # the shape of its values, rows first
    rows: np.ndarray  # [*shape], or [rows, bytes of the blocks of a row] where values are stored as bytes

    @classmethod
    def locate(cls, path: Path, content: np.ndarray, name: str, location: TensorLocation) -> _StoredTensor:
        """Locate a tensor in the contents of a file, which may be truncated."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        types = {int(known): known for known in GGMLQuantizationType}
        kind = types.get(location.type_number)
        if kind is None or kind.name not in TYPES:
            raise UnsupportedError(
                f"tensor {name!r} in {path} is of type {kind.name if kind else location.type_number}, which is not "
                f"supported; accepted: {', '.join(TYPES)}"
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        columns = location.shape[-1] if location.shape else 1
        if columns % block:
            raise ConfigError(f"tensor {name!r} in {path} has rows of {columns}, not a multiple of {block}")
        nbytes = math.prod(location.shape) // block * block_bytes
        if location.offset + nbytes > len(content):
            raise ConfigError(f"{path} ({about_size(len(content))}) is truncated: tensor {name!r} is not in it")
        stored = content[location.offset : location.offset + nbytes]
        number = {"F32": np.float32, "F16": np.float16}.get(kind.name)
        rows = stored.view(number) if number else stored
        return cls(
            kind, location.shape, rows.reshape(*location.shape[:-1], columns // block * block_bytes // rows.itemsize)
        )


class GgufFile(Checkpoint):
    """A checkpoint in one GGUF file, which is mapped into memory; a read dequantizes only the blocks of the part.
    Raises ConfigError if the file is truncated or malformed. Raises UnsupportedError if the architecture or a tensor
    type is not supported.
    """

    def __init__(self, path: Path):
        header = GgufHeader.read(path)
        if (parts := header.metadata.get("split.count", 0)) not in (0, 1):
            raise UnsupportedError(f"{path} is one of {parts} parts; merge them with llama-gguf-split")
        metadata = _Metadata(path, header.metadata)
        family = metadata.family
        content = np.memmap(path, mode="r")
        self._tensors = {
            GGUF_LLAMA.translate(name, family.names): _StoredTensor.locate(path, content, name, location)
            for name, location in header.tensors.items()
        }
        divisors = self._tensors.pop(_DIVISORS, None)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        super().__init__(_config(metadata, self._tensors, divisors), shapes)
        self._interleaved: tuple[str, ...] = ()
        if family.gguf_interleaved_rope:
            self._interleaved = tuple(f".{name}." for name in (family.names.query, family.names.key))

    def _read(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        tensor = self._tensors[name]
        stored_rows = self._stored_rows(name, rows)
        if len(tensor.shape) == 1:
            # a vector is stored as one row, whose blocks may not be divided
            return _values(tensor, tensor.rows[None], 0, tensor.shape[0])[0, stored_rows].clone()
        return _values(tensor, tensor.rows[stored_rows], columns.start, columns.stop)

    def _read_stored(self, name: str, rows: slice, columns: slice) -> BlockRows | None:
        import torch

        from shotcast.layers.quantized import BlockRows

        tensor = self._tensors[name]
        block, nbytes = BLOCKS.get(tensor.type.name, (0, 0))
        if not block or len(tensor.shape) != 2 or columns.start % block or columns.stop % block:
            return None
        part = slice(columns.start // block * nbytes, columns.stop // block * nbytes)
        stored = np.array(tensor.rows[self._stored_rows(name, rows), part], order="C")
        return BlockRows(torch.from_numpy(stored), tensor.type.name)

    def _stored_rows(self, name: str, rows: slice) -> slice | np.ndarray:
        if any(part in name for part in self._interleaved):
            return _interleaved_rows(rows.start, rows.stop, self.config.head_dim)
        return rows

    def close(self) -> None:
        self._tensors.clear()


def _interleaved_rows(first: int, last: int, head_dim: int) -> np.ndarray:
    """Return the file's rows that hold the given rows of a Hugging Face checkpoint.

    Hugging Face stores the first elements of all pairs of a head, then the second ones; the file stores pairs
    consecutively.
    """
    rows = np.arange(first, last)
    head, row = np.divmod(rows, head_dim)
    second, pair = np.divmod(row, head_dim // 2)
    return head * head_dim + 2 * pair + second


def _values(tensor: _StoredTensor, stored: np.ndarray, left: int, right: int) -> torch.Tensor:
    """Return the values in columns ``left`` to ``right`` of stored rows, in new memory."""
    import torch
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    kind = tensor.type
    if kind.name in ("F32", "F16"):
        return torch.from_numpy(np.array(stored[:, left:right]))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not len(stored) or left == right:
        dtype = torch.bfloat16 if kind.name == "BF16" else torch.float32
        return torch.empty(len(stored), right - left, dtype=dtype, device="cpu")
    first, last = left // block, -(-right // block)
    part = np.array(stored[:, first * block_bytes : last * block_bytes])
    if kind.name == "BF16":
        return torch.from_numpy(part).view(torch.bfloat16)
    values = torch.from_numpy(dequantize(part, kind))
    if values.shape[1] == right - left:
        return values
    return values[:, left - first * block : right - first * block].clone(memory_format=torch.contiguous_format)


class _Metadata:
    """An architecture's metadata, with each value checked as it is read."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]):
        self.path, self._metadata = path, metadata
        architecture = metadata.get("general.architecture")
        families = by_gguf_architecture()
        if not isinstance(architecture, str) or architecture not in families:
            raise UnsupportedError(
                f"{path} says architecture {architecture!r}, which is not supported; accepted: {', '.join(families)}"
            )
        self.family = families[architecture]
        self._architecture = architecture
        for key, values in _NEUTRAL.items():
            value = metadata.get(f"{architecture}.{key}")
            if value is not None and value not in values:
                raise UnsupportedError(f"{path} says {architecture}.{key} = {value}, which is not supported")

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of ``<architecture>.<key>``. Raises ConfigError if it is missing and has no default."""
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"{self.path} has no {self._architecture}.{key}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a non-negative integer. Raises ConfigError or UnsupportedError for anything else."""
        value = self.value(key, default)
        if isinstance(value, list):
            raise UnsupportedError(
                f"{self.path} says {self._architecture}.{key} layer by layer, which is not supported"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.path} says {self._architecture}.{key} = {value!r}, which is no count")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number. Raises ConfigError for anything else."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.path} says {self._architecture}.{key} = {value!r}, which is no number")
        with np.errstate(over="ignore"):
            # the number that the float32 was made from: 1e-05, not 9.99999974738e-06
            return float(str(np.float32(value)))

    def token_id(self, name: str) -> int | None:
        """Return a special token such as ``bos``, or None if there is none. Raises ConfigError for anything else."""
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigError(f"{self.path} says tokenizer.ggml.{name}_token_id = {value!r}, which is no token")
        return value

    def head_dim(self, default: int) -> int:
        """Return the size of a head. Raises UnsupportedError if keys, values or rotary embedding differ in size."""
        head_dim = self.count("attention.key_length", default)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.value(key, head_dim) != head_dim:
                raise UnsupportedError(
                    f"{self.path} says {self._architecture}.{key} = {self.value(key)}; it is supported only where it "
                    f"is the size of a head, {head_dim}"
                )
        return head_dim


def _config(metadata: _Metadata, tensors: Mapping[str, _StoredTensor], divisors: _StoredTensor | None) -> ModelConfig:
    heads, hidden = max(1, metadata.count("attention.head_count")), metadata.count("embedding_length")
    head_dim = metadata.head_dim(hidden // heads)
    names = metadata.family.names
    if (embeddings := tensors.get(f"{names.embeddings}.weight")) is None:
        raise ConfigError(f"{metadata.path} has no {GGUF_LLAMA.embeddings}.weight")

    def has_bias(name: str) -> bool:
        return f"{names.of_layer(0, name)}.bias" in tensors

    typical = tensors.get(f"{names.of_layer(0, names.query)}.weight", embeddings)
    rope = _rope(metadata, divisors)
    eos = map(metadata.token_id, ("eos", "eot", "eom"))
    return ModelConfig(
        hidden=hidden,
        intermediate=metadata.count("feed_forward_length"),
        layers=metadata.count("block_count"),
        heads=heads,
        kv_heads=metadata.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=embeddings.shape[0],
        norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        max_position=rope.context_length(metadata.count("context_length")),
        tied=f"{names.head}.weight" not in tensors,
        attention_bias=has_bias(names.query),
        output_bias=has_bias(names.output),
        mlp_bias=has_bias(names.down),
        qk_norm=metadata.family.qk_norm,
        sliding_window=metadata.count("attention.sliding_window", 0) or None,
        family=metadata.family.name,
        dtype={"F16": "float16", "BF16": "bfloat16"}.get(typical.type.name, "float32"),
        stored_bytes=_bytes_in_blocks(tensors, names),
        stored_on="cpu",
        eos=tuple(dict.fromkeys(token for token in eos if token is not None)),
        names=names,
    )


def _bytes_in_blocks(tensors: Mapping[str, _StoredTensor], names: WeightNames) -> float | None:
    """Return the bytes per weight of the layers' matrices; None if one is not in blocks that CPUs support."""
    tables = f"{names.embeddings}.weight", f"{names.head}.weight"
    matrices = [each for name, each in tensors.items() if len(each.shape) == 2 and name not in tables]
    if not matrices or any(each.type.name not in BLOCKS for each in matrices):
        return None
    return sum(each.rows.nbytes for each in matrices) / sum(math.prod(each.shape) for each in matrices)


def _rope(metadata: _Metadata, divisors: _StoredTensor | None) -> Rope:
    theta = metadata.number("rope.freq_base", 10000.0)
    # without a type, llama.cpp stretches linearly by the factor, which is mostly absent
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0.0)) or 1.0
    rope_type = metadata.value("rope.scaling.type", "linear")
    if rope_type == "none" or (rope_type == "linear" and factor == 1):
        rope_type = "default"
    if rope_type not in ("default", "linear", "yarn"):
        raise UnsupportedError(
            f"{metadata.path} says rope.scaling.type = {rope_type}, not supported; accepted: none, linear, yarn"
        )
    if divisors is not None:
        if rope_type != "default":
            raise UnsupportedError(f"{metadata.path} stretches rotary embedding both by {rope_type} and by {_DIVISORS}")
        each = _values(divisors, divisors.rows[None], 0, divisors.shape[0])[0].tolist()
        return Rope(theta, divisors=tuple(each))
    if rope_type == "default":
        return Rope(theta)
    if rope_type == "linear":
        return Rope(theta, "linear", factor)
    original = metadata.count("rope.scaling.original_context_length", metadata.count("context_length"))
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    )
