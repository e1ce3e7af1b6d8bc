"""GGUF files, which llama.cpp reads: weights are mostly quantised, in blocks along each row.

Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.layers.rope import Rope
from shotcast.models.checkpoint import part_of, require
from shotcast.models.config import Family, ModelConfig
from shotcast.models.gguf_header import GgufHeader, TensorPlace
from shotcast.units import about_size

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

ARCHITECTURES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Accepted values of general.architecture; Mistral's models say llama."""

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""Accepted types of tensors."""

_DIVISORS = "rope_freqs.weight"
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

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
"""Metadata that changes what is computed, with the values that leave it as it is here."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in the file.

    Args:
        shape: of its values, rows first.
        rows: [*shape] of numbers, or of the bytes of each row's blocks.
    """

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    rows: np.ndarray

    @classmethod
    def at(cls, path: Path, content: np.ndarray, name: str, place: TensorPlace) -> _Stored:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        types = {int(known): known for known in GGMLQuantizationType}
        kind = types.get(place.type_number)
        if kind is None or kind.name not in TYPES:
            raise UnsupportedError(
                f"tensor {name!r} in {path} is of type {kind.name if kind else place.type_number}, which is not "
                f"supported; accepted: {', '.join(TYPES)}"
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        columns = place.shape[-1] if place.shape else 1
        if columns % block:
            raise ConfigError(f"tensor {name!r} in {path} has rows of {columns}, not a multiple of {block}")
        nbytes = math.prod(place.shape) // block * block_bytes
        if place.offset + nbytes > len(content):
            raise ConfigError(f"{path} ({about_size(len(content))}) is truncated: tensor {name!r} is not in it")
        stored = content[place.offset : place.offset + nbytes]
        number = {"F32": np.float32, "F16": np.float16}.get(kind.name)
        rows = stored.view(number) if number else stored
        return cls(kind, place.shape, rows.reshape(*place.shape[:-1], columns // block * block_bytes // rows.itemsize))


class GgufFile:
    """A checkpoint in one GGUF file, which is mapped into memory; a read dequantises the blocks of what is asked for.

    Raises:
        ConfigError: the file is truncated or not what it should be.
        UnsupportedError: of the architecture, or the type of a tensor.
    """

    def __init__(self, path: Path):
        header = GgufHeader.of(path)
        metadata = header.metadata
        if (parts := metadata.get("split.count", 0)) not in (0, 1):
            raise UnsupportedError(f"{path} is one of {parts} parts; merge them with llama-gguf-split")
        content = np.memmap(path, mode="r")
        self._tensors = {
            _hugging_face_name(name): _Stored.at(path, content, name, place) for name, place in header.tensors.items()
        }
        divisors = self._tensors.pop(_DIVISORS, None)
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._nbytes = sum(tensor.rows.nbytes for tensor in self._tensors.values())
        self._config = _config(path, metadata, self._tensors, self._shapes, divisors)

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
        if name not in self._tensors:
            raise ConfigError("the checkpoint is closed")
        (first, last), (left, right) = part_of(shape, rows, columns, name)
        tensor = self._tensors[name]
        places: slice | np.ndarray = slice(first, last)
        if self._is_interleaved(name):
            places = _interleaved_rows(first, last, self._config.head_dim)
        if len(shape) == 1:
            # a vector is stored as one row, whose blocks may not be cut
            return _values(tensor, tensor.rows[None], 0, shape[0])[0, places].clone()
        return _values(tensor, tensor.rows[places], left, right)

    def close(self) -> None:
        self._tensors.clear()

    def _is_interleaved(self, name: str) -> bool:
        """Whether rows are in the order that rotation of neighbours wants, which llama.cpp does for this family."""
        of_layer = name.rpartition("self_attn.")[2]
        return self._config.family == "llama" and of_layer.startswith(("q_proj.", "k_proj."))


def _hugging_face_name(name: str) -> str:
    """The name that Hugging Face gives to a tensor; its own if it has no counterpart there."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _OF_LAYER:
        return f"model.layers.{match[1]}.{_OF_LAYER[match[2]]}.{match[3]}"
    return _GLOBAL.get(name, name)


def _interleaved_rows(first: int, last: int, head_dim: int) -> np.ndarray:
    """Where rows of Hugging Face's order (a head's first halves of all pairs, then the second) are in the file's (pair
    after pair)."""
    rows = np.arange(first, last)
    head, row = np.divmod(rows, head_dim)
    second, pair = np.divmod(row, head_dim // 2)
    return head * head_dim + 2 * pair + second


def _values(tensor: _Stored, stored: np.ndarray, left: int, right: int) -> torch.Tensor:
    """Columns ``left`` to ``right`` of stored rows, in memory of their own."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    kind = tensor.type
    if kind.name in ("F32", "F16"):
        return torch.from_numpy(np.array(stored[:, left:right]))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not len(stored) or left == right:
        return torch.empty(len(stored), right - left, dtype=torch.bfloat16 if kind.name == "BF16" else torch.float32)
    first, last = left // block, -(-right // block)
    part = np.array(stored[:, first * block_bytes : last * block_bytes])
    if kind.name == "BF16":
        return torch.from_numpy(part).view(torch.bfloat16)
    values = torch.from_numpy(dequantize(part, kind))
    if values.shape[1] == right - left:
        return values
    return values[:, left - first * block : right - first * block].clone(memory_format=torch.contiguous_format)


def _config(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, _Stored],
    shapes: Mapping[str, tuple[int, ...]],
    divisors: _Stored | None,
) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{path} says architecture {architecture!r}, which is not supported; accepted: {', '.join(ARCHITECTURES)}"
        )

    def said(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"{path} has no {architecture}.{key}")
        return value

    def count(key: str, default: int | None = None) -> int:
        value = said(key, default)
        if isinstance(value, list):
            raise UnsupportedError(f"{path} says {architecture}.{key} layer by layer, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{path} says {architecture}.{key} = {value!r}, which is no count")
        return value

    def number(key: str, default: float | None = None) -> float:
        value = said(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path} says {architecture}.{key} = {value!r}, which is no number")
        with np.errstate(over="ignore"):
            # what was meant by a float32: 1e-05, not 9.99999974738e-06
            return float(str(np.float32(value)))

    def token(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigError(f"{path} says tokenizer.ggml.{name}_token_id = {value!r}, which is no token")
        return value

    for key, values in _NEUTRAL.items():
        value = metadata.get(f"{architecture}.{key}")
        if value is not None and value not in values:
            raise UnsupportedError(f"{path} says {architecture}.{key} = {value}, which is not supported")
    heads, hidden = max(1, count("attention.head_count")), count("embedding_length")
    head_dim = count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if said(key, head_dim) != head_dim:
            raise UnsupportedError(
                f"{path} says {architecture}.{key} = {said(key)}; it is supported only where it is the size of a head, "
                f"{head_dim}"
            )
    if "model.embed_tokens.weight" not in shapes:
        raise ConfigError(f"{path} has no token_embd.weight")
    stored = tensors.get("model.layers.0.self_attn.q_proj.weight", tensors["model.embed_tokens.weight"])
    ends = map(token, ("eos", "eot", "eom"))
    return ModelConfig(
        hidden=hidden,
        intermediate=count("feed_forward_length"),
        layers=count("block_count"),
        heads=heads,
        kv_heads=count("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=shapes["model.embed_tokens.weight"][0],
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope=_rope(path, said, count, number, divisors),
        max_position=count("context_length"),
        tied="lm_head.weight" not in shapes,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        output_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.down_proj.bias" in shapes,
        qk_norm=architecture == "qwen3",
        sliding_window=count("attention.sliding_window", 0) or None,
        family=ARCHITECTURES[architecture],
        dtype={"F16": "float16", "BF16": "bfloat16"}.get(stored.type.name, "float32"),
        bos=token("bos"),
        eos=tuple(dict.fromkeys(token for token in ends if token is not None)),
    )


def _rope(
    path: Path,
    said: Callable[[str, str], Any],
    count: Callable[[str, int | None], int],
    number: Callable[[str, float | None], float],
    divisors: _Stored | None,
) -> Rope:
    theta = number("rope.freq_base", 10000.0)
    # without a type, llama.cpp stretches linearly by the factor, which is mostly absent
    factor = number("rope.scaling.factor", number("rope.scale_linear", 0.0)) or 1.0
    kind = said("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1):
        kind = "default"
    if kind not in ("default", "linear", "yarn"):
        raise UnsupportedError(f"{path} says rope.scaling.type = {kind}, not supported; accepted: none, linear, yarn")
    if divisors is not None:
        if kind != "default":
            raise UnsupportedError(f"{path} stretches rotary embedding both by {kind} and by {_DIVISORS}")
        each = _values(divisors, divisors.rows[None], 0, divisors.shape[0])[0].tolist()
        return Rope(theta, divisors=tuple(each))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor)
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_position=count("rope.scaling.original_context_length", count("context_length", None)),
        beta_fast=number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=number("rope.scaling.yarn_beta_slow", 1.0),
    )
